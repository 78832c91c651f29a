"""Structured output: which tokens a request's grammar allows next, by xgrammar.

Grammars are compiled by threads while prompts are computed, and masks are filled by another while the forward pass
runs (xgrammar lets go of the interpreter lock for both). A slot whose grammar is not there when it should sample is
left out of the step, and the scheduler gives it again: nobody else waits. What goes wrong with a grammar, or takes too
long, is the failure of that request alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from orcaserve.engine.messages import NewSlot
from orcaserve.engine.sampling import Grammar
from orcaserve.workers.slots import SlotTable

if TYPE_CHECKING:
    import xgrammar

MAX_REASON_CHARS = 300
_LOOSE_CHARACTERS = re.compile(r'^(\w+ ::= )\(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE)  # rule ::= (([^\"\\\r\n]))
_JSON_CHARACTERS = r'\1(([^\\"\\\\\\0-\\x1f]))'
IDLE_WAIT_S = 0.01  # of a step that has nothing to do but to sample slots whose grammars are being compiled
MAX_WHITESPACE = 32  # in a row: small models would go on with it for ever


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    compile_timeout_s: float = 10.0  # from the start of its request
    max_compiled_bytes: int = 64 * 2**20  # of one grammar, before it is used
    max_cached: int = 1024  # grammars that are kept for later requests
    max_cached_bytes: int = 512 * 2**20


class GrammarError(Exception):
    """This grammar cannot be followed; the message says why."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer, off the caller's thread, each once."""

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        limits: GrammarLimits = GrammarLimits(),
        num_threads: int = 2,
    ) -> None:
        self.tokenizer_file = tokenizer_file
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.limits = limits
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar", initializer=_step_back)
        self._compiled: OrderedDict[Grammar, Future[xgrammar.CompiledGrammar]] = OrderedDict()
        self._compiler: Future[xgrammar.GrammarCompiler] | None = None

    def compile(self, grammar: Grammar) -> Future[xgrammar.CompiledGrammar]:
        """Comes back at once. The future raises GrammarError."""
        found = self._compiled.get(grammar)
        if found is None:
            if self._compiler is None:  # 0.3 s and the whole vocabulary: not before the first grammar is asked for
                self._compiler = self.pool.submit(self._load)
            found = self._compiled[grammar] = self.pool.submit(self._compile, grammar, self._compiler)
            self._evict()
        else:
            self._compiled.move_to_end(grammar)
        return found

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _evict(self) -> None:
        """Forget the grammars that were asked for longest ago. They grow with use, so sizes are looked up anew."""
        sizes = {grammar: _num_bytes(compiled) for grammar, compiled in self._compiled.items()}
        num_bytes = sum(sizes.values())
        for grammar, size in list(sizes.items())[:-1]:
            if num_bytes <= self.limits.max_cached_bytes and len(self._compiled) <= self.limits.max_cached:
                break
            del self._compiled[grammar]
            num_bytes -= size

    def _load(self) -> xgrammar.GrammarCompiler:
        import xgrammar

        return xgrammar.GrammarCompiler(
            tokenizer_info(self.tokenizer_file, self.vocab_size, self.eos_token_ids),
            max_threads=1,
            cache_enabled=False,
            # Masks are computed at their first use: 0.4 ms instead of 66 ms for a small schema and 49,152 tokens, and
            # 2 s instead of 267 s for thirty alternatives with thirty patterns each.
            enable_dynamic_compilation=True,
        )

    def _compile(self, grammar: Grammar, compiler: Future[xgrammar.GrammarCompiler]) -> xgrammar.CompiledGrammar:
        compiled = compile_grammar(compiler.result(), grammar)
        if compiled.memory_size_bytes > self.limits.max_compiled_bytes:
            raise GrammarError(
                f"the grammar needs {compiled.memory_size_bytes} bytes when compiled, "
                f"more than {self.limits.max_compiled_bytes}"
            )
        return compiled


def _step_back() -> None:
    """This thread computes only what the model's threads leave (on Linux, where threads have a priority each)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _num_bytes(compiled: Future[xgrammar.CompiledGrammar]) -> int:
    if not compiled.done() or compiled.cancelled() or compiled.exception() is not None:
        return 0
    return compiled.result().memory_size_bytes


def compile_grammar(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    """Raises GrammarError, naming the fault."""
    try:
        match grammar.kind:
            case "json_schema":
                return compiler.compile_grammar(ebnf_of_schema(grammar.spec))
            case "json_object":
                return compiler.compile_grammar(ebnf_of_schema('{"type": "object"}', strict=False))
            case "regex":
                return compiler.compile_regex(grammar.spec)
            case "choice":
                return compiler.compile_grammar(ebnf_of_choices(json.loads(grammar.spec)))
            case "ebnf":
                return compiler.compile_grammar(grammar.spec)
    except (RuntimeError, ValueError, MemoryError) as error:
        raise GrammarError(f"the grammar does not compile: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """xgrammar puts the time and its own source line in front."""
    return re.sub(r"^\[[\d:]+\] \S+: ", "", " ".join(str(error).split()))[:MAX_REASON_CHARS]


def ebnf_of_schema(schema: str, strict: bool = True) -> str:
    """The grammar of the JSON documents that a JSON schema allows. Raises what xgrammar raises.

    xgrammar lets control characters other than line ends into strings with a minLength or maxLength, which is not
    JSON; the rule for the characters of such strings is replaced.
    """
    from xgrammar import Grammar

    text = str(Grammar.from_json_schema(schema, strict_mode=strict, max_whitespace_cnt=MAX_WHITESPACE))
    return _LOOSE_CHARACTERS.sub(_JSON_CHARACTERS, text)


def ebnf_of_choices(choices: list[str]) -> str:
    """The grammar of exactly these strings."""
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return "root ::= " + " | ".join(quoted)


def tokenizer_info(tokenizer_file: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> xgrammar.TokenizerInfo:
    """The vocabulary as xgrammar wants it, from a tokenizer.json.

    Never allowed are ids without a token, and special tokens: they would pass for the text that they are written as,
    and then be left out of the answer.
    """
    from tokenizers import Tokenizer
    from xgrammar import TokenizerInfo

    text = tokenizer_file.read_text()
    tokenizer = Tokenizer.from_str(text)
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    tokens = [""] * vocab_size
    for token, token_id in tokenizer.get_vocab().items():
        if token_id < vocab_size and token_id not in special:
            tokens[token_id] = token
    metadata = TokenizerInfo._detect_metadata_from_hf(text)
    return TokenizerInfo(tokens, **metadata, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids))


class GrammarSlots:
    """The place in its grammar of each slot that has one. It follows from the slot table: a slot that comes back
    after a preemption, or from another group, is brought to its place from the tokens that it has."""

    def __init__(
        self, slots: SlotTable, compiler: GrammarCompiler, clock: Callable[[], float] = time.monotonic
    ) -> None:
        max_num_seqs = len(slots.num_tokens)
        self.slots = slots
        self.compiler = compiler
        self.clock = clock
        self.active = np.zeros(max_num_seqs, bool)
        self.masks = torch.zeros((max_num_seqs, -(-compiler.vocab_size // 32)), dtype=torch.int32)
        self.num_accepted = np.zeros(max_num_seqs, np.int32)  # known tokens that the matcher has taken
        self.mask_length = np.zeros(max_num_seqs, np.int32)  # known tokens when the mask was filled
        self._end_mask = _bits(compiler.eos_token_ids, compiler.vocab_size)
        self._compiled: dict[int, Future[xgrammar.CompiledGrammar]] = {}
        self._due_s: dict[int, float] = {}  # when a grammar has to be compiled
        self._matchers: dict[int, xgrammar.GrammarMatcher] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._filling: Future[None] | None = None

    def add(self, new: NewSlot) -> None:
        self.free(new.slot)
        self._wait()
        if new.sampling.grammar is not None:
            self.active[new.slot] = True
            self.num_accepted[new.slot] = new.num_prompt_tokens
            self.mask_length[new.slot] = -1
            self._compiled[new.slot] = self.compiler.compile(new.sampling.grammar)
            self._due_s[new.slot] = self.clock() + self.compiler.limits.compile_timeout_s

    def free(self, slot: int) -> None:
        if self.active[slot]:
            self._wait()
            self.active[slot] = False
            self._compiled.pop(slot)
            self._due_s.pop(slot)
            self._matchers.pop(slot, None)

    def close(self) -> None:
        self._pool.shutdown()
        self.compiler.close()

    def prepare(self, slots: np.ndarray) -> None:
        """Begin to fill the masks of those of these slots whose grammar is there; `apply` waits for it."""
        self._wait()
        ready = [slot for slot in slots[self.active[slots]].tolist() if self._compiled[slot].done()]
        if ready:
            self._filling = self._pool.submit(self._fill_all, ready, self.slots.num_tokens[ready].tolist())

    def apply(self, logits: Tensor, slots: np.ndarray, lengths: np.ndarray) -> tuple[dict[int, str], list[int]]:
        """Make -inf what the grammars forbid.

        (slots that cannot go on, with the reason; slots that cannot be sampled yet, their grammars being compiled)
        """
        failed: dict[int, str] = {}
        late: list[int] = []
        rows = np.flatnonzero(self.active[slots])
        if len(rows) == 0:
            return failed, late
        self._wait()
        self._linger(slots)
        for slot, length in zip(slots[rows].tolist(), lengths[rows].tolist(), strict=True):
            try:
                if self._compiled[slot].done():
                    self._fill(slot, length)
                elif self.clock() < self._due_s[slot]:
                    late.append(slot)
                else:
                    limit = self.compiler.limits.compile_timeout_s
                    failed[slot] = f"the grammar took longer than {limit:g} s to compile"
            except GrammarError as error:
                failed[slot] = str(error)
        rows = rows[~np.isin(slots[rows], [*failed, *late])]
        if len(rows):
            self._mask(logits, rows, slots[rows])
        return failed, late

    def _linger(self, slots: np.ndarray) -> None:
        """Where every slot of the step waits for its grammar, the next step may as well come a little later."""
        if self.active[slots].all():
            compiled = [self._compiled[slot] for slot in slots.tolist()]
            if not any(each.done() for each in compiled):
                wait(compiled, IDLE_WAIT_S, FIRST_COMPLETED)

    def _wait(self) -> None:
        if self._filling is not None:
            self._filling.result()
            self._filling = None

    def _fill_all(self, slots: list[int], lengths: list[int]) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            # A grammar that failed stays so: `apply` meets the same error again and reports it.
            with contextlib.suppress(GrammarError):
                self._fill(slot, length)

    def _fill(self, slot: int, length: int) -> None:
        """Bring the matcher to `length` known tokens and the mask with it. Raises GrammarError."""
        if self.mask_length[slot] == length:
            return
        try:
            self._advance(slot, length)
        except RuntimeError as error:
            raise GrammarError(f"the grammar cannot be followed: {_reason(error)}") from error
        self.mask_length[slot] = length

    def _advance(self, slot: int, length: int) -> None:
        matcher = self._matchers.get(slot)
        if matcher is None:
            matcher = self._matchers[slot] = _matcher(self._compiled[slot].result(), self.compiler.eos_token_ids)
        for token in self.slots.token_ids[slot, self.num_accepted[slot] : length].tolist():
            if not matcher.is_terminated() and not matcher.accept_token(token):
                raise GrammarError(f"token {token} does not follow the grammar")
            self.num_accepted[slot] += 1
        if matcher.is_terminated():
            self.masks[slot] = self._end_mask
        else:
            matcher.fill_next_token_bitmask(self.masks, slot)

    def _mask(self, logits: Tensor, rows: np.ndarray, slots: np.ndarray) -> None:
        from xgrammar import apply_token_bitmask_inplace

        masks = torch.empty((len(logits), self.masks.shape[1]), dtype=torch.int32)
        masks[torch.from_numpy(rows)] = self.masks[torch.from_numpy(slots.astype(np.int64))]
        apply_token_bitmask_inplace(
            logits, masks.to(logits.device), vocab_size=self.compiler.vocab_size, indices=rows.tolist()
        )


def _matcher(compiled: xgrammar.CompiledGrammar, eos_token_ids: tuple[int, ...]) -> xgrammar.GrammarMatcher:
    from xgrammar import GrammarMatcher

    return GrammarMatcher(compiled, override_stop_tokens=list(eos_token_ids))


def _bits(token_ids: tuple[int, ...], vocab_size: int) -> Tensor:
    """A mask that allows these tokens alone: bit i % 32 of word i // 32."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[[token for token in token_ids if token < vocab_size]] = 1
    return torch.from_numpy(np.packbits(flags, bitorder="little").view(np.int32))
