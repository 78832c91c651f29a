"""What a worker does beyond one forward pass: its pool, its memory of slots, and the figures it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from rank_groups import RankGroup, RankPool, generate, greedy, make_group, token_ids
from tiny_models import assert_greedy, reference_greedy, reference_logits

from orcaserve.engine.messages import Chunk, NewSlot, StepPlan
from orcaserve.engine.sampling import SamplingParams
from orcaserve.kernels import cpu
from orcaserve.workers import kv_shard
from orcaserve.workers.config import WorkerConfig
from orcaserve.workers.errors import BackendUnusable, NotEnoughMemory, PeerLost
from orcaserve.workers.grammar import GrammarLimits
from orcaserve.workers.models.config import read_config
from orcaserve.workers.models.registry import shards_of
from orcaserve.workers.worker import Worker, num_token_ids

PROMPT = np.random.default_rng(5).integers(2, 199, 50).tolist()


def config(folder, **changes) -> WorkerConfig:
    fields = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64, "dtype": "float32"}
    return WorkerConfig(model_dir=str(folder), **(fields | changes))


@pytest.fixture(scope="module")
def worker(tiny) -> Worker:
    worker = Worker(config(tiny("qwen2")[0]), 0, "")
    worker.load()
    worker.allocate(64)
    return worker


def new_slot(slot: int, prompt: list[int], **sampling) -> NewSlot:
    params = SamplingParams(**({"max_tokens": 8, "seed": 0, "temperature": 0.0} | sampling))
    return NewSlot(slot, np.array(prompt, np.int32).tobytes(), len(prompt), params)


def plan(step_id: int, *, new=(), blocks=None, chunks=(), decodes=(), freed=(), copies=(), imports=()) -> StepPlan:
    """blocks: {slot: block ids to append}."""
    owners = [slot for slot, ids in (blocks or {}).items() for _ in ids]
    ids = [block for ids in (blocks or {}).values() for block in ids]
    columns = [np.array(values, np.int32).tobytes() for values in (owners, ids, list(decodes))]
    return StepPlan(
        step_id,
        list(freed),
        list(new),
        columns[0],
        columns[1],
        list(copies),
        list(chunks),
        columns[2],
        block_imports=list(imports),
    )


def one_token(prompt: list[int]) -> StepPlan:
    return plan(9, new=[new_slot(0, prompt)], blocks={0: [0]}, chunks=[Chunk(0, 0, len(prompt), True)])


def sampled(result) -> list[int]:
    return np.frombuffer(result.token_ids, np.int32).tolist()


def test_rows_come_back_in_the_order_of_the_plan(worker, tiny):
    """Chunks that sample, then decodes; a chunk in the middle of its prompt samples nothing."""
    model = tiny("qwen2")[1]
    worker.reset()
    a, b = PROMPT[:20], PROMPT[7:47]
    first = worker.step(plan(1, new=[new_slot(5, a)], blocks={5: [9, 3]}, chunks=[Chunk(5, 0, 20, True)]))
    assert sampled(first) == reference_greedy(model, a, 1)
    half = Chunk(2, 0, 25, False)
    result = worker.step(plan(2, new=[new_slot(2, b)], blocks={2: [1, 8, 0]}, chunks=[half], decodes=[5]))
    assert result.step_id == 2
    assert sampled(result) == reference_greedy(model, a, 2)[1:]
    result = worker.step(plan(3, chunks=[Chunk(2, 25, 15, True)], decodes=[5]))
    assert sampled(result) == reference_greedy(model, b, 1) + reference_greedy(model, a, 3)[2:]
    assert result.forward_s > 0
    assert result.sample_s > 0
    assert sampled(worker.step(plan(4, freed=[5, 2]))) == []


def test_a_copied_block_is_as_good_as_its_source(worker, tiny):
    """Two choices share a prompt; the second goes on in a copy of the last, half-filled block."""
    model = tiny("qwen2")[1]
    worker.reset()
    prompt = PROMPT[:20]
    worker.step(plan(1, new=[new_slot(0, prompt)], blocks={0: [4, 5]}, chunks=[Chunk(0, 0, 20, True)]))
    resumed = [*prompt, 77]  # the other choice had another first token
    fork = new_slot(1, resumed)
    result = worker.step(
        plan(2, new=[fork], blocks={1: [4, 6]}, copies=[(5, 6)], chunks=[Chunk(1, 20, 1, True)], decodes=[0])
    )
    assert sampled(result) == reference_greedy(model, resumed, 1) + reference_greedy(model, prompt, 2)[1:]


def test_reset_forgets_everything(worker):
    worker.reset()
    before = sampled(
        worker.step(plan(1, new=[new_slot(0, PROMPT)], blocks={0: [0, 1, 2, 3]}, chunks=[Chunk(0, 0, 50, True)]))
    )
    worker.reset()
    after = sampled(
        worker.step(plan(1, new=[new_slot(0, PROMPT)], blocks={0: [7, 5, 6, 9]}, chunks=[Chunk(0, 0, 50, True)]))
    )
    assert before == after
    worker.warm_up()
    assert worker.runner.slots.num_tokens.sum() == 0


def test_kv_that_outlives_its_scheduler_is_named(worker, tiny):
    """Whole blocks alone: of a prompt half-way, and of a decoding stream without the token that it sampled last."""
    model = tiny("qwen2")[1]
    worker.reset()
    a, b = PROMPT[:30], PROMPT[7:50]
    new = [msgspec.structs.replace(new_slot(5, a), root=b"a"), msgspec.structs.replace(new_slot(2, b), root=b"b")]
    chunks = [Chunk(5, 0, 30, True), Chunk(2, 0, 20, False)]
    tokens = sampled(worker.step(plan(1, new=new, blocks={5: [9, 3, 4], 2: [1, 8, 0]}, chunks=chunks)))
    assert [(kept.root, len(kept.blocks) // 4) for kept in worker.kept_kv()] == [(b"b", 1), (b"a", 1)]
    tokens += sampled(worker.step(plan(2, decodes=[5])))
    assert worker.kept_kv()[1].blocks == np.array([9], np.int32).tobytes()  # 32 tokens are known, 31 computed
    tokens += sampled(worker.step(plan(3, decodes=[5])))
    kept = worker.kept_kv()
    assert [entry.blocks for entry in kept] == [np.array(ids, np.int32).tobytes() for ids in ([1], [9, 3])]
    assert [np.frombuffer(entry.token_ids, np.int32).tolist() for entry in kept] == [b[:16], [*a, *tokens][:32]]
    worker.reset()
    assert worker.kept_kv() == []
    known = [*a, *tokens]
    again = new_slot(0, known)
    result = worker.step(plan(1, new=[again], blocks={0: [9, 3, 7]}, chunks=[Chunk(0, 32, 1, True)]))
    assert tokens + sampled(result) == reference_greedy(model, a, 4)


def test_logprobs_of_prompt_and_answer_are_transformers(worker, tiny):
    model = tiny("qwen2")[1]
    worker.reset()
    prompt = PROMPT[:30]
    new = new_slot(0, prompt, prompt_logprobs=2, logprobs=2)
    first = worker.step(plan(1, new=[new], blocks={0: [2, 3]}, chunks=[Chunk(0, 0, 18, False)]))
    second = worker.step(plan(2, chunks=[Chunk(0, 18, 12, True)]))
    entries = first.prompt_logprobs[0] + second.prompt_logprobs[0]
    expected = reference_logits(model, prompt).log_softmax(-1)
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for position, entry in enumerate(entries[1:], 1):
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-3)
        assert [token for token, _ in entry.top] == expected[position - 1].topk(2).indices.tolist()
    [answer] = second.logprobs[0]
    assert answer.logprob == pytest.approx(float(expected[-1].max()), abs=1e-3)


@pytest.mark.parametrize("size", [1, 2])
def test_a_pool_too_small_for_all_changes_no_text(tiny, size):
    """Requests are preempted and computed again."""
    folder, model = tiny("mistral")
    group = make_group(folder, size, num_blocks=12)
    prompts = [PROMPT[start : start + 40] for start in range(4)]
    found = generate(group, [greedy(str(i), prompt, 40) for i, prompt in enumerate(prompts)], budget=32)
    for i, prompt in enumerate(prompts):
        assert_greedy(model, prompt, token_ids(found[str(i)]), 40)


@pytest.mark.parametrize("size", [1, 2])
def test_speculation_and_plans_in_flight_change_no_text(tiny, size):
    """A prompt that repeats itself, so that drafts are proposed; a model whose weights make it repeat some."""
    folder, model = tiny("llama", initializer_range=0.02)
    group = make_group(folder, size, num_speculative_tokens=4)
    prompts = [PROMPT[:6] * 4, PROMPT[:20], [5, 5, 5, 5, 5, 5]]
    requests = [greedy(str(i), prompt, 40) for i, prompt in enumerate(prompts)]
    for options in ({"num_speculative_tokens": 4}, {"max_steps_in_flight": 2}):
        found = generate(group, requests, budget=32, arrive_every=2, **options)
        for i, prompt in enumerate(prompts):
            assert_greedy(model, prompt, token_ids(found[str(i)]), 40)


def test_accepted_drafts_are_counted(tiny):
    folder, model = tiny("llama", initializer_range=0.02)
    worker = Worker(config(folder, num_speculative_tokens=3), 0, "")
    worker.load()
    worker.allocate(32)
    looped = [5, 6, *reference_greedy(model, [5, 6], 20)]
    assert len(set(looped[-6:])) < 6, "the model goes round in circles: what it said is what it will say"
    new = new_slot(0, looped, max_tokens=30)
    worker.step(plan(1, new=[new], blocks={0: [0, 1, 2, 3]}, chunks=[Chunk(0, 0, len(looped), True)]))
    result = worker.step(StepPlan(2, [], [], b"", b"", [], [], np.zeros(1, np.int32).tobytes(), 3))
    assert 1 <= result.num_drafted <= 3
    assert result.num_accepted == result.num_drafted
    assert np.frombuffer(result.num_tokens, np.int32).tolist() == [result.num_accepted + 1]
    assert sampled(result) == reference_greedy(model, looped, 5)[1 : 2 + result.num_accepted]


def test_the_pool_counts_this_ranks_heads(tiny):
    """6 heads, 2 KV heads, 3 layers, 16 per head, float32: 2 * 3 * 16 * 16 * 4 bytes a block and KV head."""
    folder, _ = tiny("llama")
    model = read_config(folder)
    a_head = 2 * 3 * 16 * 16 * 4
    for size, heads in ((1, 2), (2, 1), (4, 1)):
        shape = kv_shard.KvShape(model, shards_of(model, size)[0], 16, torch.float32)
        assert shape.block_bytes == heads * a_head
        asked = config(folder, tensor_parallel_size=size, kv_cache_memory_bytes=10 * a_head + 5)
        assert kv_shard.num_cpu_blocks(asked, shape) == 10 // heads
        caches = shape.allocate(7, torch.device("cpu"))
        assert [cache.shape for cache in caches] == [(2, 7, heads, 16, 16)] * 3
        assert sum(cache.nbytes for cache in caches) == 7 * shape.block_bytes


def test_a_pool_without_room_is_refused_with_the_numbers(tiny):
    folder, _ = tiny("llama")
    model = read_config(folder)
    shape = kv_shard.KvShape(model, shards_of(model, 1)[0], 16, torch.float32)
    with pytest.raises(NotEnoughMemory, match=f"kv_cache_memory_bytes is 1000.* {shape.block_bytes} bytes"):
        kv_shard.num_cpu_blocks(config(folder, kv_cache_memory_bytes=1000), shape)
    half = kv_shard.total_memory_bytes() // 2 + 1
    assert kv_shard.num_cpu_blocks(config(folder, kv_cache_memory_bytes=half), shape) == half // shape.block_bytes
    with pytest.raises(NotEnoughMemory, match=f"{half} for each of 2 ranks, and all memory of this machine is"):
        kv_shard.num_cpu_blocks(config(folder, tensor_parallel_size=2, kv_cache_memory_bytes=half), shape)


def test_by_default_the_pool_takes_a_share_of_what_is_free(tiny):
    folder, _ = tiny("llama")
    model = read_config(folder)
    shape = kv_shard.KvShape(model, shards_of(model, 1)[0], 16, torch.float32)
    taken = kv_shard.num_cpu_blocks(config(folder), shape) * shape.block_bytes
    assert 0 < taken <= min(kv_shard.MAX_DEFAULT_BYTES, kv_shard.free_memory_bytes())


def test_ids_that_the_tokenizer_does_not_know_are_padding(tmp_path):
    assert num_token_ids(tmp_path, 100) == 100, "no tokenizer, no padding"
    for vocab in ({"a": 0, "b": 1, "c": 7}, [["a", 0.0]] * 8):
        tokenizer = {"model": {"vocab": vocab}, "added_tokens": [{"id": 9, "content": "<s>"}]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert num_token_ids(tmp_path, 16) == 10


def test_an_attention_backend_that_cannot_run_is_refused_before_the_weights_are_read(tiny, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny("llama")[0] / "config.json").read_bytes())
    with pytest.raises(
        BackendUnusable, match=r"^paged_attention: backend 'xformers' cannot run on device 'cpu': [^\n]*$"
    ):
        Worker(config(tmp_path, attention_backend="xformers"), 0, "").load()


@pytest.mark.parametrize("size", [1, 2])
def test_once_it_is_warm_a_rank_waits_no_longer_than_a_step_may_take(tiny, size):
    """Rank 1 is called no more."""
    group = make_group(tiny("llama")[0], size, step_timeout_s=0.5)
    group.call("warm_up")
    plan = one_token(PROMPT[:3])
    if size == 1:
        group.step(plan)
        return
    group.links[0].send(("step", (plan,)))
    assert group.links[0].poll(20)
    succeeded, error = group.links[0].recv()
    assert not succeeded
    assert isinstance(error, PeerLost)


def test_the_limits_of_grammars_reach_the_compiler(tiny, tmp_path):
    for file in tiny("llama")[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    limits = {"grammar_compile_timeout_s": 3.0, "max_grammar_bytes": 5, "grammar_cache_bytes": 7}
    worker = Worker(config(tmp_path, **limits), 0, "")
    worker.load()
    worker.allocate(8)
    assert worker.sampler.grammars.compiler.limits == GrammarLimits(3.0, 5, max_cached_bytes=7)
    worker.close()


def test_kernels_are_compiled_into_the_folder_that_is_named(tiny, tmp_path):
    code = (
        "import sys; from pathlib import Path; from orcaserve.workers.config import WorkerConfig;"
        "from orcaserve.workers.worker import Worker;"
        "Worker(WorkerConfig(model_dir=sys.argv[1], max_model_len=64, max_num_seqs=2, max_num_batched_tokens=8,"
        "cache_dir=sys.argv[2]), 0, '').load()"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny("llama")[0]), str(tmp_path / "cache")], check=True)
    assert len(list((tmp_path / "cache").glob("cpu-*.so"))) == cpu.available()


def test_padding_of_the_vocabulary_is_never_sampled(tiny, tmp_path):
    """The favourite token of this model is one that no tokenizer has."""
    folder, model = tiny("llama")
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    ids = reference_logits(model, PROMPT)[-1].argsort(descending=True).tolist()
    known = ids[0]  # ids from the favourite on are unknown
    tokenizer = {"model": {"type": "BPE", "vocab": {str(i): i for i in range(known)}, "merges": []}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    worker = Worker(config(tmp_path), 0, "")
    worker.load()
    worker.allocate(8)
    result = worker.step(plan(1, new=[new_slot(0, PROMPT)], blocks={0: [0, 1, 2, 3]}, chunks=[Chunk(0, 0, 50, True)]))
    assert sampled(result) == [next(token for token in ids if token < known)]
    worker.close()


@pytest.fixture
def doomed_ranks(tmp_path_factory) -> Iterator[RankPool]:
    pool = RankPool(tmp_path_factory.mktemp("doomed"))
    yield pool
    pool.kill()


@pytest.mark.parametrize("size", [1, 2])
def test_a_neighbour_goes_on_with_the_blocks_of_a_killed_group(tiny, doomed_ranks, size):
    """43 tokens are computed when it dies: what lies behind them in the third block is of another stream."""
    heir = make_group(tiny("llama")[0], size, num_blocks=16, share_kv=True)
    lost = RankGroup(doomed_ranks.links(size), heir.config, num_blocks=16)
    heir.hold(7, lost.pool_files())
    prompt = PROMPT[:40]

    def compute(blocks: list[int], num_tokens: int) -> tuple[list[int], list[np.ndarray]]:
        """The tokens and their logits, from the first on."""
        lost.call("reset")
        first = plan(0, new=[new_slot(3, prompt)], blocks={3: blocks}, chunks=[Chunk(3, 0, len(prompt), True)])
        steps = [lost.call("step_with_logits", first)]
        steps += [lost.call("step_with_logits", plan(step, decodes=[3])) for step in range(1, num_tokens)]
        return [token for result, _ in steps for token in sampled(result)], [logits for _, [logits] in steps]

    tokens, logits = compute([6, 9, 3], 8)
    known = [*prompt, *compute([9, 3, 6], 4)[0]]
    doomed_ranks.kill()
    new = NewSlot(2, np.array(known, np.int32).tobytes(), len(prompt), new_slot(2, prompt).sampling)
    first = plan(
        0,
        new=[new],
        blocks={2: [4, 8, 5]},
        imports=[(7, 6, 1), (7, 9, 4), (7, 3, 8)],
        copies=[(1, 5)],  # of a block that is imported in the same step
        chunks=[Chunk(2, 43, 1, True)],
    )
    steps = [heir.call("step_with_logits", first)]
    steps += [heir.call("step_with_logits", plan(step, decodes=[2])) for step in range(1, 4)]
    assert known[40:] + [token for result, _ in steps for token in sampled(result)] == tokens
    assert all(map(np.array_equal, [rows for _, [rows] in steps], logits[4:]))


def test_a_worker_holds_pools_until_they_are_dropped_or_it_is_reset(tiny):
    worker = Worker(config(tiny("llama")[0], share_kv=True), 0, "")
    worker.load()
    assert worker.pool_file is None, "not allocated yet"
    worker.allocate(64)
    file = worker.pool_file
    assert file is not None
    for drop in (lambda: worker.drop(7), worker.reset):
        worker.hold(7, file)
        worker.step(plan(0, imports=[(7, 1, 2)]))
        drop()
        with pytest.raises(AssertionError, match="group 7 is not held"):
            worker.step(plan(0, imports=[(7, 1, 2)]))
    worker.close()
    assert not os.path.lexists(file.path)


def test_the_pool_is_private_unless_asked_for(worker):
    assert worker.pool_file is None
    with pytest.raises(AssertionError, match="not shared"):
        worker.step(plan(0, imports=[(7, 1, 2)]))
