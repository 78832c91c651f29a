"""Structured output: whatever the model says, the text follows the grammar, and a bad grammar harms its own request."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from grammar_bench import EOS, NUM_PADDING, SCHEMA, SPECIAL, Bench
from tokenizers import Tokenizer

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.messages import GenerateRequest, NewSlot, StepResult
from orcaserve.engine.sampling import Grammar, SamplingParams
from orcaserve.engine.scheduler import Scheduler
from orcaserve.workers.grammar import GrammarCompiler, GrammarLimits, ebnf_of_choices
from orcaserve.workers.sampler import Sampler


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
        event = bench.hold_compiler()
        bench.take(0, Grammar("json_schema", json.dumps(schema)), wait_for_grammar=False)
        bench.take(1, None)
        assert "longer than 0 s" in bench.step(0, 1).failed[0]
        event.set()
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
