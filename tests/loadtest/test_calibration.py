"""Learning from a server's trace: the work of each step is found again, and a run is predicted from its own steps."""

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from orcaserve.cli import app
from orcaserve.cluster.step_trace import StepTrace
from orcaserve.cluster.wire import StepSeen, StepTimes
from orcaserve.engine.config import SchedulerConfig
from orcaserve.engine.scheduler import Scheduler
from orcaserve.loadtest.arrivals import ClosedLoop
from orcaserve.loadtest.calibration import Server, read_trace, simulate_run
from orcaserve.loadtest.metrics import NO_SLO, RequestRecord, summarize
from orcaserve.loadtest.model_shape import load_shape
from orcaserve.loadtest.report import write_json
from orcaserve.loadtest.run import RunResult
from orcaserve.loadtest.simulate import Simulation, VirtualWorkers
from orcaserve.loadtest.step_time import CPU, StepTime, find_device
from orcaserve.loadtest.workload import LoadRequest

USERS = 6
TRUTH = msgspec.structs.replace(
    CPU, memory_efficiency=0.5, flops_efficiency=0.2, kv_efficiency=0.1, step_overhead_s=2e-3, row_overhead_s=1e-4
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    folder = tmp_path / "small-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Served:
    """A run of a server that takes exactly what TRUTH says: its steps, as a trace, and its requests."""

    def __init__(self, server: Server, folder: Path, num_requests: int = 40) -> None:
        rng = np.random.default_rng(0)
        load = [LoadRequest(i, int(rng.integers(20, 400)), int(rng.integers(2, 60))) for i in range(num_requests)]
        config = SchedulerConfig(
            max_model_len=512,
            eos_token_ids=(),
            max_num_seqs=server.max_num_seqs,
            max_num_batched_tokens=server.max_num_batched_tokens,
            enable_prefix_caching=False,
        )
        scheduler = Scheduler(config)
        scheduler.add_group(0, 1000)
        workers = {0: VirtualWorkers(StepTime(server.shape, TRUTH, 1), server.max_num_seqs)}
        simulation = Simulation(scheduler, workers, load, ClosedLoop(USERS), keep_steps=True)
        seen: list[StepSeen] = []

        def listen(now, plan, work, deltas) -> None:
            prefill = [(chunk.slot, chunk.num_tokens) for chunk in plan.chunks]
            times = StepTimes(*[now - work.seconds] * len(StepTimes.__struct_fields__))
            seen.append(StepSeen(len(seen), 0, plan.step_id, work.seconds, prefill, plan.decode_slots, times))

        simulation.on_step(listen)
        outcome = simulation.run()
        assert outcome.steps is not None
        self.steps = outcome.steps
        trace = StepTrace()
        trace.add(SimpleNamespace(steps=seen, rank_steps=[]))
        self.trace = folder / "trace.json"
        self.trace.write_text(json.dumps(trace.chrome()))
        records = [
            RequestRecord(
                index=r.index,
                due_s=float(outcome.arrival_s[r.index]),
                sent_s=float(outcome.arrival_s[r.index]),
                first_s=float(outcome.first_s[r.index]),
                end_s=float(outcome.end_s[r.index]),
                prompt_tokens=r.prompt_tokens,
                output_tokens=r.output_tokens,
                status="ok",
            )
            for r in load
        ]
        self.run = RunResult("run", "m", f"closed loop, {USERS} users", "", summarize(records, NO_SLO), records)


@pytest.fixture
def server(model: Path) -> Server:
    return Server(shape=load_shape(str(model)), max_num_seqs=16, max_num_batched_tokens=128)


@pytest.fixture
def served(server: Server, tmp_path: Path) -> Served:
    return Served(server, tmp_path)


def test_a_trace_tells_the_work_of_every_step(served: Served) -> None:
    found = read_trace(served.trace)
    for name in ("prefill_tokens", "decode_tokens", "rows", "kv_tokens", "prefill_pairs"):
        assert getattr(found, name) == getattr(served.steps, name), name
    assert found.seconds == pytest.approx(served.steps.seconds)


def test_steps_with_contexts_from_before_the_trace_are_left_out(served: Served) -> None:
    trace = json.loads(served.trace.read_text())
    plans = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"] == "plan"]
    served.trace.write_text(json.dumps({"traceEvents": plans[30:]}))
    found = read_trace(served.trace)
    assert 20 < len(found) < len(plans) - 30
    assert set(found.kv_tokens) <= set(served.steps.kv_tokens)


def test_a_run_is_predicted_from_the_steps_of_another(server: Server, served: Served, tmp_path: Path) -> None:
    compared = simulate_run(server, TRUTH, served.run)
    assert compared.users == USERS
    assert compared.ratios == pytest.approx(dict.fromkeys(compared.ratios, 1.0), rel=1e-6)
    write_json([served.run], tmp_path / "results.json")
    arguments = [
        "simulate",
        "calibrate",
        str(served.trace),
        str(served.trace),
        "--model",
        str(tmp_path / "small-model"),
    ]
    arguments += [
        "--against",
        str(tmp_path / "results.json"),
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "128",
    ]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["steps"]["median"] < 0.03
    assert f"calibrated on {2 * len(served.steps)} measured steps" in told["device"]["source"]
    [ratios] = told["runs"]
    assert all(0.95 < ratio < 1.05 for ratio in ratios.values()), ratios
    assert (tmp_path / "out" / "calibration.html").stat().st_size > 10_000
    device = find_device(str(tmp_path / "out" / "device.json"))
    assert "calibrated" in device.source


def test_what_cannot_be_compared_is_refused(server: Server, served: Served, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a closed loop"):
        simulate_run(server, TRUTH, msgspec.structs.replace(served.run, arrivals="open loop, 3 requests/s"))
    for content in ("{}", "[]", '{"traceEvents": [{"ph": "X", "name": "plan", "tid": 0, "ts": 1, "args": {}}]}', "no"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ValueError, match=r"bad\.json: not a trace"):
            read_trace(tmp_path / "bad.json")
        with pytest.raises(ValueError, match="not a calibrated device"):
            find_device(str(tmp_path / "bad.json"))
