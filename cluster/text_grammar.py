"""Checks output grammars (JSON schema, regex, EBNF) before the engine sees them: in a process of its own.

The checker is xgrammar, the same that the workers compile with. It costs 2.5 s and 270 MB to import (it brings torch)
and some patterns keep it busy for minutes, which no thread can interrupt; so it lives in a helper process that starts
with the first grammar, has a bounded address space, is killed when a grammar takes too long, and ends when there was
nothing to check for a minute.

Lines of JSON go both ways: {"kind", "spec"} in, {"error"} out (null when the grammar is good).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
import sys
from collections import OrderedDict

from orcaserve.engine.errors import InvalidParameter, QueueFull, Unavailable
from orcaserve.engine.sampling import Grammar

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_MAX_BYTES = 6 * 2**30  # address space; torch alone maps 2 GB
_NUM_REMEMBERED = 1024
_MAX_REASON_CHARS = 300
_MAX_WAITING = 16
_IDLE_S = 60.0


class GrammarChecker:
    """One per router. Verdicts are remembered, since most callers send the same few schemas."""

    def __init__(self, tokenizer_file: str, vocab_size: int, timeout_s: float, idle_s: float = _IDLE_S) -> None:
        self._arguments = (tokenizer_file, str(vocab_size))
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._farewell: asyncio.Task[None] | None = None  # ends the helper when it has been idle
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._verdicts: OrderedDict[Grammar, str | None] = OrderedDict()

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raises InvalidParameter when the grammar does not compile, or not in time; QueueFull; Unavailable."""
        if grammar.kind in ("json_object", "choice"):  # nothing in them can be wrong
            return
        if grammar not in self._verdicts:
            await self._decide(grammar)
        reason = self._verdicts[grammar]
        self._verdicts.move_to_end(grammar)
        if len(self._verdicts) > _NUM_REMEMBERED:
            self._verdicts.popitem(last=False)
        if reason is not None:
            raise InvalidParameter(f"{param}: {reason}", param)

    async def _decide(self, grammar: Grammar) -> None:
        if self._num_waiting >= _MAX_WAITING:
            raise QueueFull(f"{self._num_waiting} grammars are waiting to be checked.", retry_after_s=self._timeout_s)
        self._num_waiting += 1
        try:
            async with self._turn:
                if grammar not in self._verdicts:
                    self._verdicts[grammar] = await self._ask(grammar)
        finally:
            self._num_waiting -= 1
            self._say_farewell()

    async def close(self) -> None:
        """End the helper."""
        if self._farewell is not None:
            self._farewell.cancel()
        await self._end()

    def _say_farewell(self) -> None:
        """In a minute, unless there is more to check."""
        if self._farewell is not None:
            self._farewell.cancel()
        self._farewell = asyncio.create_task(self._end_when_idle())

    async def _end_when_idle(self) -> None:
        await asyncio.sleep(self._idle_s)
        async with self._turn:
            await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _ask(self, grammar: Grammar) -> str | None:
        question = json.dumps({"kind": grammar.kind, "spec": grammar.spec}).encode() + b"\n"
        answered = False
        try:
            helper = await self._started()
            assert helper.stdin is not None
            assert helper.stdout is not None
            helper.stdin.write(question)
            async with asyncio.timeout(self._timeout_s):
                reason = json.loads(await helper.stdout.readline())["error"]
            answered = True
            return reason
        except TimeoutError:
            return f"the grammar took longer than {self._timeout_s:g} s to compile"
        except (ValueError, ConnectionError):  # it died half-way: out of its memory, or a fault in the compiler
            return "the grammar is too large to compile"
        finally:
            if not answered:  # also when the client has left: what it says later would be taken for the next answer
                await self._end()

    async def _started(self) -> asyncio.subprocess.Process:
        """Raises Unavailable."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        hello = b""
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "orcaserve.cluster.text_grammar",
                *self._arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=2**20,
            )
            assert process.stdout is not None
            async with asyncio.timeout(_START_TIMEOUT_S):
                hello = await process.stdout.readline()  # it says when it has loaded the tokenizer
        except OSError as error:  # no memory or descriptors for another process, or no hello in time
            logger.warning("no grammar helper: %r", error)
        if not hello:  # nothing that the grammar is to blame for
            raise Unavailable("Grammars cannot be checked at the moment.", retry_after_s=5.0)
        return process


def main(tokenizer_file: str, vocab_size: int) -> None:
    """The helper's loop, until its input ends."""
    import xgrammar

    with open(tokenizer_file) as file:
        info = _tokenizer_info(file.read(), vocab_size)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    # As the workers compile: masks come when they are used. Thirty alternatives of thirty patterns: 2 s instead of 267.
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=True)
    print("{}", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps({"error": _compile(compiler, question["kind"], question["spec"])}), flush=True)


def _tokenizer_info(tokenizer_json: str, vocab_size: int):  # type: ignore[no-untyped-def]  # xgrammar loads lazily
    from tokenizers import Tokenizer
    from xgrammar import TokenizerInfo

    vocabulary = Tokenizer.from_str(tokenizer_json).get_vocab()
    rows = [""] * vocab_size
    for token, token_id in vocabulary.items():
        if token_id < vocab_size:
            rows[token_id] = token
    kind = TokenizerInfo._detect_metadata_from_hf(tokenizer_json)
    return TokenizerInfo(rows, **kind, vocab_size=vocab_size, stop_token_ids=[0])


def _compile(compiler, kind: str, spec: str) -> str | None:  # type: ignore[no-untyped-def]
    """Why this grammar is no good, or None."""
    try:
        if kind == "json_schema":
            compiler.compile_json_schema(spec)
        elif kind == "regex":
            compiler.compile_regex(spec)
        else:
            compiler.compile_grammar(spec)
    except (RuntimeError, ValueError, MemoryError) as error:
        # xgrammar puts the time and its own source line in front.
        reason = re.sub(r"^\[[\d:]+\] \S+: ", "", " ".join(str(error).split()))
        return f"the grammar does not compile: {reason}"[:_MAX_REASON_CHARS]
    return None


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
