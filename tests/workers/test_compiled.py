"""torch.compile as an option of the runner: another way to the same tokens."""

from __future__ import annotations

import pytest
from tiny_models import assert_greedy
from torch._dynamo.utils import counters

from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.messages import GenerateRequest, StepPlan
from orcaserve.engine.sampling import SamplingParams
from orcaserve.engine.scheduler import Scheduler
from orcaserve.kernels.cpu import library
from orcaserve.workers.config import WorkerConfig
from orcaserve.workers.errors import CannotCompile
from orcaserve.workers.worker import Worker

PROMPTS = [[5], [5, 6, 7], list(range(10, 40))]


def config(folder, **changes) -> WorkerConfig:
    fields = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "dtype": "float32"}
    return WorkerConfig(model_dir=str(folder), torch_compile=True, **fields, **changes)


@pytest.fixture
def no_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: products are torch's, and layers are not one native call."""
    monkeypatch.setattr(library._Holder, "library", None)
    monkeypatch.setattr(library._Holder, "failure", "not wanted")


@pytest.mark.nightly  # half a minute of C++ compilations, where no earlier run has left them
def test_greedy_tokens_are_those_of_transformers(tiny, no_native_kernels):
    """Alone, together, within a block and over its end; nothing is compiled once the worker is there."""
    folder, model = tiny("qwen3", num_hidden_layers=2)
    worker = Worker(config(folder, attention_backend="reference"), 0, "")
    worker.load()
    worker.allocate(32)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    scheduler = Scheduler(SchedulerConfig(max_model_len=64, eos_token_ids=(), max_num_batched_tokens=64))
    scheduler.add_group(0, 32)
    found: dict[str, list[int]] = {}
    for name, prompt in enumerate(PROMPTS):
        scheduler.add(GenerateRequest(str(name), tuple(prompt), SamplingParams(20 + name, 0, temperature=0.0)), 0.0)
        found[str(name)] = []
    while scheduler.has_work(0):
        plan = scheduler.schedule(0, 0.0)
        assert isinstance(plan, StepPlan)
        for deltas in scheduler.apply(0, worker.step(plan), 0.0).values():
            for delta in deltas:
                found[delta.request_id] += delta.token_ids
    for name, prompt in enumerate(PROMPTS):
        assert_greedy(model, prompt, found[str(name)], 20 + name)
    assert counters["stats"]["unique_graphs"] == num_graphs
    worker.close()


def test_where_it_cannot_be_had_it_is_refused(tiny):
    with pytest.raises(CannotCompile, match="several ranks"):
        Worker(config(tiny("llama")[0], tensor_parallel_size=2), 0, "").load()
    if library.available():
        with pytest.raises(CannotCompile, match="one native call"):
            Worker(config(tiny("llama")[0]), 0, "").load()
