"""A rank whose model is a parrot: it says what the prompt tells it to say. All else about it is real.

The text after the last "SAY:" of the prompt (up to the end of the turn) comes out token by token, then the end token,
then the same again for those who go on. Choice k > 0 says "k " first. Without "SAY:" it counts in words.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from orcaserve.cluster.channel import BlockingClient, ChannelClosed, Endpoint
from orcaserve.cluster.wire import Done, Hello, Leave, Step, Timed, ToRank
from orcaserve.engine.messages import StepPlan, StepResult, TokenLogprobs
from orcaserve.workers.slots import SlotTable

COUNTING = " one two three four five six seven eight nine ten eleven twelve"


@dataclass
class Parrot:
    """The model. `script` gives ids for a prompt instead of its words, where a test wants exact ids."""

    tokenizer: Tokenizer
    eos_token_id: int
    max_num_seqs: int
    max_model_len: int
    script: list[int] | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    pace_s: float = 0.0
    fail: str = ""  # every request ends with this error
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.gate.set()
        self.slots = SlotTable(self.max_num_seqs, self.max_model_len, block_size=16)
        self._said: dict[int, list[int]] = {}

    def step(self, plan: StepPlan) -> StepResult:
        self.gate.wait()
        if self.pace_s:
            threading.Event().wait(self.pace_s)
        self.num_steps += 1
        self.slots.apply_plan(plan)
        for new in plan.new_slots:
            self._said[new.slot] = self._lines(new.slot)
        rows = [c.slot for c in plan.chunks if c.samples] + np.frombuffer(plan.decode_slots, np.int32).tolist()
        ids = [self._next(slot) for slot in rows]
        logprobs = {
            slot: [self._logprobs(slot, token)] for slot, token in zip(rows, ids, strict=True) if self._asks(slot)
        }
        failed = dict.fromkeys(rows, self.fail) if self.fail else {}
        if rows:
            self.slots.append(np.array(rows), np.array(ids, np.int32))
        return StepResult(
            plan.step_id,
            np.array(ids, np.int32).tobytes(),
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(plan),
            failed=failed,
        )

    def _lines(self, slot: int) -> list[int]:
        table = self.slots
        prompt = table.token_ids[slot, : table.num_prompt_tokens[slot]].tolist()
        choice = int(table.choice_index[slot])
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        _, said, rest = text.rpartition("SAY:")
        words = rest.split("<|im_end|>")[0] if said else COUNTING
        ids = self.tokenizer.encode(words, add_special_tokens=False).ids if self.script is None else list(self.script)
        return (self.tokenizer.encode(f"{choice} ").ids if choice else []) + ids + [self.eos_token_id]

    def _next(self, slot: int) -> int:
        line = self._said[slot]
        return line[int(self.slots.num_tokens[slot] - self.slots.num_prompt_tokens[slot]) % len(line)]

    def _asks(self, slot: int) -> bool:
        sampling = self.slots.sampling[slot]
        return sampling is not None and sampling.logprobs is not None

    def _logprobs(self, slot: int, token: int, num_top: int | None = None) -> TokenLogprobs:
        sampling = self.slots.sampling[slot]
        assert sampling is not None
        num = (sampling.logprobs or 0) if num_top is None else num_top
        top = [(token, -0.25)] + [(100 + i, -1.5 - i) for i in range(num - 1)]
        return TokenLogprobs(token, -0.25 if token != self.eos_token_id else float("-inf"), 1, top[:num])

    def _prompt_logprobs(self, plan: StepPlan) -> dict[int, list[TokenLogprobs | None]]:
        found: dict[int, list[TokenLogprobs | None]] = {}
        for chunk in plan.chunks:
            sampling = self.slots.sampling[chunk.slot]
            assert sampling is not None
            if sampling.prompt_logprobs is None:
                continue
            end = min(chunk.start + chunk.num_tokens, int(self.slots.num_prompt_tokens[chunk.slot]))
            found[chunk.slot] = [
                self._logprobs(chunk.slot, int(self.slots.token_ids[chunk.slot, i]), sampling.prompt_logprobs)
                if i
                else None
                for i in range(chunk.start, end)
            ]
        return found


class RankThread:
    """A rank's loop around anything that steps: a Parrot, or the real workers.Worker."""

    def __init__(self, endpoint: Endpoint, worker: Parrot) -> None:
        self._link: BlockingClient[ToRank] = BlockingClient(endpoint, ToRank)
        self._worker = worker
        self._link.send(Hello(0, "a", 0))
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            while not isinstance(message := self._link.recv(), Leave):
                assert isinstance(message, Step)
                began_s = time.monotonic()
                result = self._worker.step(message.plan)
                if message.traced:
                    self._link.send(Timed(message.plan.step_id, began_s, time.monotonic()))
                self._link.send(Done(result))
        except ChannelClosed:
            pass
        finally:
            self._link.close()
