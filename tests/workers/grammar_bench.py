"""A sampler with a grammar compiler over a small tokenizer, stepped by hand."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from orcaserve.engine.messages import NewSlot, StepPlan
from orcaserve.engine.sampling import Grammar, SamplingParams
from orcaserve.workers.grammar import GrammarCompiler, GrammarLimits, GrammarSlots
from orcaserve.workers.sampler import Sampled, Sampler
from orcaserve.workers.slots import SlotTable

EOS = 0
SPECIAL = "<|start|>"
NUM_PADDING = 7  # ids of the model that the tokenizer does not have
CORPUS = [
    '{"name": "Ada", "age": 36, "tags": ["a", "b"], "ok": true, "none": null}',
    "yes no maybe 12.5e-3 [1, 2]",
] * 20
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "minItems": 1, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def save_tokenizer(file: Path) -> Path:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>", SPECIAL], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(file))
    return file


def hold(compiler: GrammarCompiler) -> threading.Event:
    event = threading.Event()
    for _ in range(compiler.pool._max_workers):
        compiler.pool.submit(event.wait, 60)
    return event


class Bench:
    def __init__(self, tokenizer_file: Path, tokenizer: Tokenizer, limits: GrammarLimits) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size() + NUM_PADDING
        self.slots = SlotTable(8, max_model_len=800, block_size=16)
        compiler = GrammarCompiler(tokenizer_file, self.vocab_size, (EOS,), limits)
        self.sampler = Sampler(self.slots, self.vocab_size, (EOS,), torch.device("cpu"), compiler)

    def take(
        self,
        slot: int,
        grammar: Grammar | None,
        output: list[int] | None = None,
        wait_for_grammar: bool = True,
        **params: Any,
    ) -> None:
        sampling = SamplingParams(max_tokens=700, grammar=grammar, **{"seed": slot, **params})
        ids = np.array([5, 6, 7, *(output or [])], np.int32)
        new = NewSlot(slot, ids.tobytes(), 3, sampling)
        self.slots.apply_plan(StepPlan(0, [slot], [new], b"", b"", [], [], b""))
        self.sampler.free(slot)
        self.sampler.add(new)
        if grammar is not None and wait_for_grammar:
            self.await_grammar(slot)

    @property
    def grammars(self) -> GrammarSlots:
        assert self.sampler.grammars is not None
        return self.sampler.grammars

    def await_grammar(self, slot: int) -> None:
        wait([self.grammars._compiled[slot]])

    def hold_compiler(self) -> threading.Event:
        """Keep the compiler's threads busy until the event is set."""
        return hold(self.grammars.compiler)

    def logits(self, slot: int, extra: int = 0) -> torch.Tensor:
        """Noise that depends on the slot's history, with a liking for the end."""
        history = self.slots.token_ids[slot, : self.slots.num_tokens[slot] + extra]
        seed = int((history * np.arange(1, len(history) + 1)).sum())
        logits = torch.randn(1, self.vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
        logits[0, EOS] = 6.0
        return logits

    def step(self, *slots: int) -> Sampled:
        rows = np.array(slots, np.int32)
        self.sampler.prepare(rows)
        sampled = self.sampler.sample(torch.cat([self.logits(slot) for slot in slots]), rows)
        self.slots.append(rows[sampled.num_tokens > 0], sampled.token_ids)
        return sampled

    def output(self, slot: int) -> list[int]:
        return self.slots.token_ids[slot, 3 : self.slots.num_tokens[slot]].tolist()

    def finish(self, *slots: int) -> list[str]:
        """Step until each of these has ended; their texts."""
        going = set(slots)
        for _ in range(600):
            assert self.step(*sorted(going)).failed == {}
            going -= {slot for slot in going if self.output(slot)[-1] == EOS}
            if not going:
                return [self.text(slot) for slot in slots]
        raise AssertionError(f"slots {going} do not end: {self.text(next(iter(going)))!r}")

    def text(self, slot: int) -> str:
        ids = self.output(slot)
        return self.tokenizer.decode(ids[: ids.index(EOS)] if EOS in ids else ids)
