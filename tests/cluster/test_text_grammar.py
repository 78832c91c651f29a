"""The grammar helper: verdicts, and what happens when it is too slow or dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.text_grammar import GrammarChecker
from orcaserve.engine.errors import InvalidParameter, QueueFull
from orcaserve.engine.sampling import Grammar

GOOD = Grammar("regex", "[0-9]{3}")
# Every number of a's up to a thousand, in a thousand ways.
SLOW = Grammar("ebnf", "root ::= " + " | ".join(f'"{"a" * n}" [a-z]{{{n},{n * 50}}}' for n in range(1, 400)))
Test = Callable[[GrammarChecker], Awaitable[None]]


def with_checker(model: ModelInfo, timeout_s: float, test: Test, idle_s: float = 60.0) -> None:
    async def run() -> None:
        checker = GrammarChecker(model.tokenizer_file, model.vocab_size, timeout_s, idle_s)
        try:
            await test(checker)
        finally:
            await checker.close()

    asyncio.run(run())


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_served(model: ModelInfo) -> None:
    async def test(checker: GrammarChecker) -> None:
        await checker.check(GOOD, "p")
        first = checker._process
        checker._timeout_s = 1e-4
        with pytest.raises(InvalidParameter, match="took longer than"):
            await checker.check(SLOW, "p")
        assert first is not None
        assert first.returncode is not None  # it was ended, whatever it was at
        checker._timeout_s = 60.0
        await checker.check(Grammar("regex", "[a-f]+"), "p")

    with_checker(model, 60.0, test)


def test_a_helper_that_dies_costs_one_request(model: ModelInfo) -> None:
    async def test(checker: GrammarChecker) -> None:
        await checker.check(GOOD, "p")
        assert checker._process is not None
        checker._process.kill()
        await checker._process.wait()
        await checker.check(Grammar("regex", "x+"), "p")
        with pytest.raises(InvalidParameter, match="does not compile"):
            await checker.check(Grammar("regex", "("), "p")

    with_checker(model, 60.0, test)


def test_an_idle_helper_ends_and_the_next_grammar_starts_another(model: ModelInfo) -> None:
    async def test(checker: GrammarChecker) -> None:
        await checker.check(GOOD, "p")
        helper = checker._process
        assert helper is not None
        async with asyncio.timeout(10):
            await helper.wait()
        assert checker._process is None
        checker._idle_s = 60.0
        await checker.check(Grammar("regex", "y+"), "p")
        assert checker._process is not None

    with_checker(model, 60.0, test, idle_s=0.05)


def test_verdicts_are_remembered_and_the_line_is_bounded(model: ModelInfo) -> None:
    async def test(checker: GrammarChecker) -> None:
        asked = [checker.check(Grammar("regex", f"{i}+"), "p") for i in range(40)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(result, QueueFull) for result in results) == 40 - 16
        assert all(result is None or isinstance(result, QueueFull) for result in results)
        await checker.close()
        await checker.check(Grammar("regex", "0+"), "p")
        assert checker._process is None  # nobody had to be asked

    with_checker(model, 60.0, test)
