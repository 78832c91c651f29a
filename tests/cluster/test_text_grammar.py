"""The grammar helper: verdicts, and what happens when it is too slow or dies."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections.abc import Iterator
from itertools import count

import pytest

from orcaserve.cluster import text_grammar
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.text_grammar import GrammarChecker
from orcaserve.engine.errors import InvalidParameter, QueueFull, Unavailable
from orcaserve.engine.sampling import Grammar

# Every number of a's up to a thousand, in a thousand ways.
SLOW = Grammar("ebnf", "root ::= " + " | ".join(f'"{"a" * n}" [a-z]{{{n},{n * 50}}}' for n in range(1, 400)))
_new = count()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def checker(model: ModelInfo, runner: asyncio.Runner) -> Iterator[GrammarChecker]:
    """One for all tests: a helper takes seconds to start."""
    checker = GrammarChecker(model.tokenizer_file, model.vocab_size, 60.0)
    yield checker
    runner.run(checker.close())


def new_grammar() -> Grammar:
    """One that was never asked about."""
    return Grammar("regex", f"[0-9]{{3}}x{next(_new)}")


async def helper_of(checker: GrammarChecker) -> Process:
    """Its running helper."""
    await checker.check(new_grammar(), "p")
    assert checker._process is not None
    return checker._process


async def started_by(task: asyncio.Task[None], checker: GrammarChecker) -> Process:
    """The helper that `task` has just started and waits for."""
    while checker._process is None:
        assert not task.done()
        await asyncio.sleep(0)
    return checker._process


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_served(
    runner: asyncio.Runner, checker: GrammarChecker
) -> None:
    async def test() -> None:
        helper = await helper_of(checker)
        checker._timeout_s = 1e-4
        with pytest.raises(InvalidParameter, match="took longer than"):
            await checker.check(SLOW, "p")
        assert helper.returncode is not None  # it was ended, whatever it was at
        checker._timeout_s = 60.0
        assert await helper_of(checker) is not helper

    runner.run(test())


def test_a_helper_that_dies_costs_one_request(runner: asyncio.Runner, checker: GrammarChecker) -> None:
    async def test() -> None:
        helper = await helper_of(checker)
        helper.kill()
        await helper.wait()
        assert await helper_of(checker) is not helper
        with pytest.raises(InvalidParameter, match="does not compile"):
            await checker.check(Grammar("regex", "("), "p")

    runner.run(test())


def test_who_leaves_while_the_helper_starts_takes_nobody_elses_verdict(
    runner: asyncio.Runner, checker: GrammarChecker
) -> None:
    async def test() -> None:
        await checker.close()
        leaver = asyncio.create_task(checker.check(new_grammar(), "p"))
        helper = await started_by(leaver, checker)
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        assert helper.returncode is not None
        with pytest.raises(InvalidParameter, match="does not compile"):
            await checker.check(Grammar("regex", "(a"), "p")
        await checker.check(new_grammar(), "p")

    runner.run(test())


@pytest.mark.parametrize("way", ["it dies", "it takes too long"])
def test_a_helper_that_does_not_start_is_no_fault_of_the_grammar(
    way: str, runner: asyncio.Runner, checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        await checker.close()
        grammar = new_grammar()
        with monkeypatch.context() as patch:
            if way == "it takes too long":
                patch.setattr(text_grammar, "_START_TIMEOUT_S", 0.0)
            asker = asyncio.create_task(checker.check(grammar, "p"))
            helper = await started_by(asker, checker)
            if way == "it dies":
                helper.kill()
            with pytest.raises(Unavailable):
                await asker
        assert helper.returncode is not None
        await checker.check(grammar, "p")  # and nothing bad is remembered of it

    runner.run(test())


def test_an_idle_helper_ends_and_the_next_grammar_starts_another(
    runner: asyncio.Runner, checker: GrammarChecker
) -> None:
    async def test() -> None:
        checker._idle_s = 0.05
        helper = await helper_of(checker)
        async with asyncio.timeout(10):
            await helper.wait()
        assert checker._process is None
        checker._idle_s = 60.0
        assert await helper_of(checker) is not helper

    runner.run(test())


def test_verdicts_are_remembered_and_the_line_is_bounded(runner: asyncio.Runner, checker: GrammarChecker) -> None:
    async def test() -> None:
        grammars = [new_grammar() for _ in range(40)]
        results = await asyncio.gather(*(checker.check(g, "p") for g in grammars), return_exceptions=True)
        assert sum(isinstance(result, QueueFull) for result in results) == 40 - 16
        assert all(result is None or isinstance(result, QueueFull) for result in results)
        await checker.close()
        await checker.check(grammars[0], "p")
        assert checker._process is None  # nobody had to be asked

    runner.run(test())
