"""Structured output: whatever the model says, the text follows the grammar, and a bad grammar harms its own request."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from rank_groups import generate, greedy, make_group, token_ids
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.messages import GenerateRequest, NewSlot, StepPlan, StepResult, TokenDelta
from orcaserve.engine.sampling import Grammar, SamplingParams
from orcaserve.engine.scheduler import Scheduler
from orcaserve.workers.config import WorkerConfig
from orcaserve.workers.grammar import GrammarCompiler, GrammarLimits, GrammarSlots, ebnf_of_choices
from orcaserve.workers.sampler import Sampled, Sampler
from orcaserve.workers.slots import SlotTable
from orcaserve.workers.worker import Worker

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


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>", SPECIAL], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_file))


@pytest.fixture
def bench(tokenizer_file: Path, tokenizer: Tokenizer) -> Iterator[Bench]:
    bench = Bench(tokenizer_file, tokenizer, GrammarLimits())
    yield bench
    bench.sampler.close()


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


class TestOutputFollowsTheGrammar:
    def test_json_schema(self, bench: Bench) -> None:
        for slot in range(8):
            bench.take(slot, Grammar("json_schema", json.dumps(SCHEMA)), temperature=slot / 4)
        texts = bench.finish(*range(8))
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)
        assert len(set(texts)) > 1

    def test_strings_of_limited_length_hold_no_control_characters(self, bench: Bench) -> None:
        grammar = Grammar("json_schema", '{"type": "string", "minLength": 20, "maxLength": 30}')
        # Bytes from 128 on, as the byte-level alphabet writes them: half a character counts as a whole one.
        beyond_ascii = tuple(
            (token_id,)
            for token, token_id in bench.tokenizer.get_vocab().items()
            if any("\u00a1" <= char <= "\u00ff" or char > "\u0121" for char in token)
        )
        for slot in range(8):
            bench.take(slot, grammar, temperature=2.0, bad_words=beyond_ascii)
        for text in bench.finish(*range(8)):
            assert 20 <= len(json.loads(text)) <= 30

    def test_json_object(self, bench: Bench) -> None:
        for slot in range(4):
            bench.take(slot, Grammar("json_object"), logit_bias=((bench.tokenizer.token_to_id("}"), 9.0),))
        for text in bench.finish(*range(4)):
            assert isinstance(json.loads(text), dict)

    def test_regex(self, bench: Bench) -> None:
        for slot in range(4):
            bench.take(slot, Grammar("regex", r"[a-c]{2,4}-\d{3}(\.x)?"))
        for text in bench.finish(*range(4)):
            assert re.fullmatch(r"[a-c]{2,4}-\d{3}(\.x)?", text)

    def test_choice(self, bench: Bench) -> None:
        choices = ["yes", 'say "no"', "back\\slash", "naïve\n🦊"]
        for slot in range(8):
            bench.take(slot, Grammar("choice", json.dumps(choices)), temperature=2.0)
        texts = bench.finish(*range(8))
        assert set(texts) <= set(choices)
        assert len(set(texts)) > 1

    def test_every_choice_can_be_made(self, bench: Bench) -> None:
        for choice in ('say "no"', "back\\slash", "naïve\n🦊", "tab\there", "\x7f\u2028"):
            bench.take(0, Grammar("choice", json.dumps([choice])))
            assert bench.finish(0) == [choice]

    def test_ebnf(self, bench: Bench) -> None:
        bench.take(0, Grammar("ebnf", 'root ::= "(" root ")" | "x"'))
        (text,) = bench.finish(0)
        assert re.fullmatch(r"\(*x\)*", text)
        assert text.count("(") == text.count(")")

    def test_padding_is_never_allowed(self, bench: Bench) -> None:
        bench.take(0, Grammar("regex", ".*"))
        logits = torch.zeros(1, bench.vocab_size)
        logits[0, -NUM_PADDING:] = 100.0
        assert bench.sampler.sample(logits, np.array([0])).token_ids[0] < bench.vocab_size - NUM_PADDING

    def test_special_tokens_are_no_text(self, bench: Bench) -> None:
        special = bench.tokenizer.token_to_id(SPECIAL)
        bench.take(0, Grammar("regex", ".*"), temperature=0.0)
        logits = torch.zeros(1, bench.vocab_size)
        logits[0, special] = 100.0
        assert bench.sampler.sample(logits, np.array([0])).token_ids[0] != special
        bench.take(0, Grammar("choice", json.dumps([SPECIAL])))
        assert bench.finish(0) == [SPECIAL]
        assert special not in bench.output(0)

    def test_after_the_end_there_is_only_the_end(self, bench: Bench) -> None:
        bench.take(0, Grammar("choice", '["yes"]'), ignore_eos=True)
        bench.finish(0)
        for _ in range(3):
            assert bench.step(0).token_ids[0] == EOS


class TestItsOwnRow:
    def test_rows_without_a_grammar_are_not_touched(self, bench: Bench) -> None:
        bench.take(0, None, temperature=1.0)
        alone = [int(bench.step(0).token_ids[0]) for _ in range(20)]
        bench.take(0, None, temperature=1.0)
        bench.take(1, Grammar("json_schema", json.dumps(SCHEMA)))
        assert [int(bench.step(0, 1).token_ids[0]) for _ in range(20)] == alone

    def test_resumed_in_another_slot(self, bench: Bench) -> None:
        grammar = Grammar("json_schema", json.dumps(SCHEMA))
        bench.take(0, grammar, seed=9, temperature=1.0)
        bench.finish(0)
        whole = bench.output(0)
        for cut in (0, 1, len(whole) // 2, len(whole) - 1):
            bench.take(3, grammar, output=whole[:cut], seed=9, temperature=1.0)
            bench.finish(3)
            assert bench.output(3) == whole

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_speculation_gives_the_same_text(self, bench: Bench, temperature: float) -> None:
        grammar = Grammar("json_schema", json.dumps(SCHEMA))
        bench.take(0, grammar, temperature=temperature, seed=4)
        bench.finish(0)
        whole = bench.output(0)
        bench.take(1, grammar, temperature=temperature, seed=4)
        num_steps = 0
        while len(bench.output(1)) < len(whole):
            # Drafts that are right, then wrong, then past the end of the text.
            done = len(bench.output(1))
            draft = np.array([*whole[done : done + 3], 9, 9, 9][: 5 - num_steps % 3], np.int32)
            known = bench.slots.num_tokens[1]
            bench.slots.token_ids[1, known : known + len(draft)] = draft
            logits = torch.cat([bench.logits(1, extra) for extra in range(len(draft) + 1)])
            bench.sampler.prepare(np.array([1]))
            sampled = bench.sampler.verify(logits, np.array([1]), [draft])
            assert sampled.failed == {}
            for token in sampled.token_ids:
                bench.slots.append(np.array([1]), np.array([token]))
            num_steps += 1
        assert bench.output(1) == whole
        assert num_steps < len(whole) / 2


class TestMinTokens:
    def test_the_end_waits_as_long_as_the_grammar_has_something_to_say(self, bench: Bench) -> None:
        for slot in range(4):
            bench.take(slot, Grammar("regex", "[a-z]*"), min_tokens=12)
        bench.take(4, None, min_tokens=12)
        texts = bench.finish(0, 1, 2, 3)
        assert all(len(bench.output(slot)) > 12 for slot in range(4))
        assert all(re.fullmatch("[a-z]*", text) for text in texts)

    def test_a_grammar_that_is_at_its_end_ends(self, bench: Bench) -> None:
        stop = bench.tokenizer.token_to_id("!")
        bench.take(0, Grammar("choice", '["yes"]'), min_tokens=30, logprobs=0)
        bench.take(1, Grammar("choice", '["no!"]'), min_tokens=30, stop_token_ids=(stop,))
        bench.take(2, None, min_tokens=30)
        for _ in range(8):
            assert bench.step(0, 1, 2).failed == {}
        assert bench.text(0) == "yes"
        assert bench.text(1) == "no!"
        assert EOS not in bench.output(2)

    def test_the_engine_takes_it_for_the_end(self) -> None:
        sampling = SamplingParams(20, 1, min_tokens=10, grammar=Grammar("choice", '["yes"]'))
        config = SchedulerConfig(max_model_len=64, eos_token_ids=(EOS,))
        scheduler = Scheduler(config)
        scheduler.add_group(0, 16)
        scheduler.add(GenerateRequest("r", (5, 6, 7), sampling), 0.0)
        found = []
        for token in (8, 9, EOS):
            plan = scheduler.schedule(0, 0.0)
            assert plan is not None
            result = StepResult(plan.step_id, np.array([token], np.int32).tobytes())
            found += [d for deltas in scheduler.apply(0, result, 0.0).values() for d in deltas]
        assert found[-1].finish_reason == "stop"
        assert not scheduler.has_work(0)


class TestFailures:
    @pytest.mark.parametrize(
        "grammar",
        [
            Grammar("regex", "("),
            Grammar("json_schema", '{"type": "objekt"}'),
            Grammar("json_schema", '{"$ref": "#/nope"}'),
            Grammar("ebnf", "root ::= missing"),
        ],
    )
    def test_a_grammar_that_does_not_compile_ends_its_request_alone(self, bench: Bench, grammar: Grammar) -> None:
        bench.take(0, Grammar("choice", '["yes"]'))
        bench.take(1, grammar)
        bench.take(2, None, temperature=0.0)
        best = int(bench.logits(2).argmax())
        sampled = bench.step(0, 1, 2)
        assert set(sampled.failed) == {1}
        assert "does not compile" in sampled.failed[1]
        assert "/project/" not in sampled.failed[1]
        assert sampled.token_ids[2] == best
        bench.sampler.free(1)
        assert bench.finish(0) == ["yes"]

    def test_one_that_takes_too_long(self, tokenizer_file: Path, tokenizer: Tokenizer) -> None:
        bench = Bench(tokenizer_file, tokenizer, GrammarLimits(compile_timeout_s=0.0))
        schema = {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(400)}}
        bench.take(0, Grammar("json_schema", json.dumps(schema)), wait_for_grammar=False)
        bench.take(1, None)
        assert "longer than 0 s" in bench.step(0, 1).failed[0]
        bench.sampler.close()

    def test_one_that_is_too_large(self, tokenizer_file: Path, tokenizer: Tokenizer) -> None:
        bench = Bench(tokenizer_file, tokenizer, GrammarLimits(max_compiled_bytes=1000))
        bench.take(0, Grammar("json_schema", json.dumps(SCHEMA)))
        assert "more than 1000" in bench.step(0).failed[0]
        bench.sampler.close()

    def test_history_that_does_not_fit_the_grammar(self, bench: Bench) -> None:
        bench.take(0, Grammar("choice", '["yes"]'), output=[bench.tokenizer.token_to_id("q")])
        assert "does not follow the grammar" in bench.step(0).failed[0]

    def test_a_sampler_without_a_tokenizer_says_so(self, bench: Bench) -> None:
        sampler = Sampler(bench.slots, bench.vocab_size, (EOS,), torch.device("cpu"))
        bench.take(0, Grammar("choice", '["yes"]'))
        params = bench.slots.sampling[0]
        assert params is not None
        sampler.add(NewSlot(0, np.array([5, 6, 7], np.int32).tobytes(), 3, params))
        assert "no tokenizer" in sampler.sample(bench.logits(0), np.array([0])).failed[0]


class TestAGrammarThatIsLate:
    """Its slot is left out of the step; nobody else waits."""

    def test_others_are_sampled_as_if_they_were_alone(self, bench: Bench) -> None:
        bench.take(1, None, temperature=1.0)
        alone = [int(bench.step(1).token_ids[0]) for _ in range(5)]
        event = bench.hold_compiler()
        bench.take(0, Grammar("choice", '["yes"]'), wait_for_grammar=False, logprobs=1)
        bench.take(1, None, temperature=1.0)
        for token in alone:
            sampled = bench.step(0, 1)
            assert sampled.num_tokens.tolist() == [0, 1]
            assert sampled.token_ids.tolist() == [token]
            assert sampled.failed == sampled.logprobs == {}
        event.set()
        bench.await_grammar(0)
        assert bench.finish(0) == ["yes"]

    def test_beside_a_slot_that_verifies_a_draft(self, bench: Bench) -> None:
        bench.take(1, None, temperature=0.0)
        event = bench.hold_compiler()
        bench.take(0, Grammar("choice", '["yes"]'), wait_for_grammar=False)
        draft = np.array([int(bench.logits(1).argmax()), 9], np.int32)
        logits = torch.cat([bench.logits(0), bench.logits(1), bench.logits(1), bench.logits(1)])
        sampled = bench.sampler.verify(logits, np.array([0, 1]), [np.zeros(0, np.int32), draft])
        assert sampled.num_tokens.tolist()[0] == 0
        assert sampled.token_ids.tolist()[0] == draft[0]
        assert len(sampled.token_ids) == sampled.num_tokens.sum()
        event.set()

    def test_it_fails_once_its_time_is_over(self, bench: Bench) -> None:
        now = 0.0
        bench.grammars.clock = lambda: now
        event = bench.hold_compiler()
        bench.take(0, Grammar("choice", '["yes"]'), wait_for_grammar=False)
        bench.take(1, None)
        assert bench.step(0, 1).failed == {}
        now = bench.grammars.compiler.limits.compile_timeout_s + 0.1
        sampled = bench.step(0, 1)
        assert "longer than 10 s" in sampled.failed[0]
        assert sampled.num_tokens.tolist() == [1, 1]
        event.set()

    def test_through_scheduler_and_worker(self, tiny: Callable[..., tuple[Path, Any]], tokenizer_file: Path) -> None:
        """The other stream has its token at every step; in the end all is as if the grammar had been there."""
        folder, _ = tiny("llama", vocab_size=420)
        (folder / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
        grammar = Grammar("json_schema", json.dumps(SCHEMA))
        requests = [
            greedy("free", [5, 6, 7], 40),
            GenerateRequest("held", (5, 6, 7), SamplingParams(200, 3, grammar=grammar)),
            GenerateRequest(
                "short", tuple(range(5, 37)), SamplingParams(1, 4, grammar=grammar, prompt_logprobs=0), n=2
            ),
        ]
        expected = {size: generate(make_group(folder, size), requests, max_steps_in_flight=2) for size in (1, 2)}
        assert texts(expected[1]) == texts(expected[2])

        config = WorkerConfig(
            model_dir=str(folder), dtype="float32", max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64
        )
        worker = Worker(config, 0, "")
        worker.load()
        worker.allocate(64)
        assert worker.sampler is not None
        assert worker.sampler.grammars is not None
        event = hold(worker.sampler.grammars.compiler)
        found: dict[str, list[TokenDelta]] = {"free": [], "held": [], "short": []}
        scheduler = Scheduler(
            SchedulerConfig(max_model_len=256, eos_token_ids=(), max_num_batched_tokens=64, max_steps_in_flight=2)
        )
        scheduler.add_group(0, 64)
        for request in requests:
            scheduler.add(request, 0.0)
        num_steps = 0
        while scheduler.has_work(0):
            plans = []
            while (plan := scheduler.schedule(0, 0.0)) is not None:
                plans.append(plan)
            for plan in plans:
                num_steps += 1
                for deltas in scheduler.apply(0, worker.step(plan), 0.0).values():
                    for delta in deltas:
                        found[delta.request_id].append(delta)
                scheduler.check_invariants()
                assert len(token_ids(found["free"])) == min(num_steps, 40)
            if num_steps == 20:
                assert found["held"] == found["short"] == []
                event.set()
        worker.close()
        assert texts(found) == texts(expected[1])
        assert [len(d.prompt_logprobs) for d in found["short"] if d.prompt_logprobs] == [32]


def texts(found: dict[str, list[TokenDelta]]) -> dict[str, list[tuple[int, list[int]]]]:
    """By request and choice."""
    return {
        name: [(c, token_ids([d for d in deltas if d.choice_index == c])) for c in {d.choice_index for d in deltas}]
        for name, deltas in found.items()
    }


class TestCompiler:
    def test_a_grammar_is_compiled_once_while_there_is_room(self, tokenizer_file: Path) -> None:
        first, second, third = (Grammar("choice", json.dumps([text])) for text in "abc")
        compiler = GrammarCompiler(tokenizer_file, 300, (EOS,))
        compiled = compiler.compile(first)
        assert compiler.compile(first) is compiled
        size = compiled.result().memory_size_bytes
        compiler.close()

        compiler = GrammarCompiler(tokenizer_file, 300, (EOS,), GrammarLimits(max_cached_bytes=2 * size))
        kept, forgotten = compiler.compile(first), compiler.compile(second)
        kept.result(), forgotten.result()
        assert compiler.compile(first) is kept
        compiler.compile(third).result()
        compiler.compile(Grammar("choice", '["d"]')).result()
        assert compiler.compile(second) is not forgotten
        compiler.close()

        compiler = GrammarCompiler(tokenizer_file, 300, (EOS,), GrammarLimits(max_cached=1))
        forgotten, kept = compiler.compile(first), compiler.compile(second)
        assert compiler.compile(second) is kept
        assert compiler.compile(first) is not forgotten
        compiler.close()

    def test_choices_are_quoted(self) -> None:
        assert ebnf_of_choices(['a"b', "c\n"]) == 'root ::= "a\\"b" | "c\\n"'
