"""Groups on several nodes: two Ray nodes with four pretended GPUs each, on which the real model runs on the CPU."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table

from orcaserve.cluster.config import ServeConfig
from orcaserve.cluster.drain import drain_node
from orcaserve.cluster.model_info import read_model_info
from orcaserve.cluster.router import Router, find_model
from orcaserve.cluster.scheduler_actor import OtherOptions, connect, ensure_scheduler
from orcaserve.cluster.stream import EngineStream
from orcaserve.cluster.wire import ClusterStatus
from orcaserve.engine.errors import Unavailable
from orcaserve.engine.messages import GenerateRequest
from orcaserve.engine.sampling import SamplingParams
from orcaserve.workers import demo
from tests.waiting import eventually

T = TypeVar("T")
GPU_NODE = {"num_cpus": 4, "num_gpus": 4, "resources": {"accelerator_type:H100": 1}, "object_store_memory": 80 * 2**20}


class Site:
    """The cluster, its scheduler, and a stream to it on a loop of its own."""

    def __init__(self) -> None:
        head = {"num_cpus": 4, "resources": {"scheduler": 1}, "object_store_memory": 80 * 2**20}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.add_node(**GPU_NODE) for _ in range(2)]
        self.cluster.wait_for_nodes()
        ray.init(address=self.cluster.address, namespace="tests", log_to_driver=False, logging_level="ERROR")
        self.config = ServeConfig(
            model="smollm2-135m",  # every node finds out by itself where that is
            name="site",
            device="cpu",
            groups=2,
            tensor_parallel_size=2,
            gpus_per_group=4,
            accelerator_type="H100",
            dtype="float32",
            num_threads=1,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            kv_cache_memory="64MiB",
        )
        self.scheduler = ensure_scheduler(self.config, read_model_info(demo.pull("smollm2-135m")), "cpu")
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.stream = self.run(self.open("site"))

    async def open(self, application: str) -> EngineStream:
        stream = connect(application)
        await stream.start()
        return stream

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.start(work).result(120)

    def status(self) -> ClusterStatus:
        return self.run(self.stream.status(timeout_s=50))

    def states(self) -> list[str]:
        try:
            return [group.state for group in self.status().groups]
        except Unavailable:
            return ["away"]

    async def generate(self, prompt: tuple[int, ...], num_tokens: int, stream: EngineStream | None = None) -> list[int]:
        sampling = SamplingParams(max_tokens=num_tokens, seed=3, temperature=0.7, ignore_eos=True)
        deltas = await (stream or self.stream).submit(GenerateRequest(f"t{random.getrandbits(64):x}", prompt, sampling))
        ids: list[int] = []
        async for delta in deltas:
            assert delta.finish_reason in (None, "length"), delta
            ids.extend(delta.token_ids)
        return ids

    def start_all(self, prompts: list[tuple[int, ...]], lengths: Sequence[int]) -> list[Future[list[int]]]:
        return [self.start(self.generate(*case)) for case in zip(prompts, lengths, strict=True)]

    def undisturbed(self, prompts: list[tuple[int, ...]], lengths: Sequence[int]) -> list[list[int]]:
        return [future.result(240) for future in self.start_all(prompts, lengths)]

    def close(self) -> None:
        self.run(self.stream.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        ray.get(self.scheduler.stop.remote(0.0))
        ray.kill(self.scheduler)
        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    try:
        eventually(lambda: site.states() == ["ready", "ready"], 180)
        yield site
    finally:
        site.close()


def placements() -> int:
    return sum(entry["state"] in ("CREATED", "PENDING") for entry in placement_group_table().values())


def test_a_router_finds_a_model_by_its_name(site: Site) -> None:
    assert find_model("smollm2-135m") == demo.pull("smollm2-135m")
    with pytest.raises(ray.exceptions.RayTaskError, match="no model directory, no GGUF file, no hub id"):
        find_model("smollm3")


@pytest.mark.filterwarnings("ignore:coroutine 'Router.__del__'")  # the collector's own call, which nobody awaits
def test_a_router_that_could_not_start_can_be_ended(site: Site) -> None:
    """Ray Serve calls the destructor of what its constructor left half made."""
    router = Router.__new__(Router)
    with pytest.raises(ray.exceptions.RayTaskError, match="no model directory"):
        router.__init__(site.config.model_copy(update={"model": "smollm3"}))  # type: ignore[misc]
    site.run(router.__del__())


def test_case_27_an_update_in_place_with_another_model_is_refused(site: Site) -> None:
    """And with other engine options; the old model would answer in the new one's name. The routers' own may change."""
    model = read_model_info(demo.pull("smollm2-135m"))
    for name, value in (("model", "another"), ("max_num_seqs", 8)):
        with pytest.raises(OtherOptions, match=f"site runs with other values of {name}: "):
            ensure_scheduler(site.config.model_copy(update={name: value}), model, "cpu")
    assert ensure_scheduler(site.config.model_copy(update={"max_choices": 8}), model, "cpu") == site.scheduler


def test_the_scheduler_sits_where_nodes_are_set_aside_for_it(site: Site) -> None:
    [raylet] = site.cluster.head_node.all_processes["raylet"]
    parent = Path(f"/proc/{site.status().scheduler_pid}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) == raylet.process.pid


def test_a_group_lives_on_one_node_and_each_on_its_own(site: Site) -> None:
    groups = site.status().groups
    assert [len(set(group.node_ids)) for group in groups] == [1, 1]
    assert groups[0].node_ids[0] != groups[1].node_ids[0]
    assert len({pid for group in groups for pid in group.pids}) == 4
    assert placements() == 2


def test_streams_survive_the_loss_of_a_node(site: Site) -> None:
    prompts = [(i + 7, 1200 + i, 99) for i in range(6)]
    expected = site.undisturbed(prompts, [100] * 6)
    at_first = site.status()
    before = at_first.scheduler.generation_tokens
    running = site.start_all(prompts, [100] * 6)
    eventually(lambda: site.status().scheduler.generation_tokens > before + 60, 120)
    lost = site.status().groups[0].node_ids[0]
    [node] = [node for node in site.nodes if node.node_id == lost]
    site.cluster.remove_node(node, allow_graceful=False)
    assert not all(future.done() for future in running)
    assert [future.result(240) for future in running] == expected
    eventually(lambda: site.status().groups[0].phase == "placing", 120)
    assert site.status().ready

    site.nodes = [other for other in site.nodes if other is not node] + [site.cluster.add_node(**GPU_NODE)]
    eventually(lambda: site.states() == ["ready", "ready"], 180)
    assert placements() == 2
    assert site.status().num_group_losses == at_first.num_group_losses + 1


def test_a_killed_rank_ends_its_whole_group_and_nobodys_stream(site: Site) -> None:
    prompts = [(i + 5, 46) for i in range(4)]
    expected = site.undisturbed(prompts, [30] * 4)
    running = site.start_all(prompts, [30] * 4)
    eventually(lambda: site.status().scheduler.running == 4, 60)
    losses, victims = site.status().num_group_losses, site.status().groups[1].pids
    os.kill(victims[1], signal.SIGKILL)
    eventually(lambda: site.status().groups[1].state != "ready", 60)
    assert [future.result(240) for future in running] == expected
    eventually(lambda: site.states() == ["ready", "ready"], 180)
    assert not any(Path(f"/proc/{pid}").exists() for pid in victims)
    assert placements() == 2
    assert site.status().num_group_losses == losses + 1


def test_fewer_groups_finish_their_work_first_and_give_their_place_back(site: Site) -> None:
    losses = site.status().num_group_losses
    prompts = [(i + 3, 44) for i in range(6)]
    expected = site.undisturbed(prompts, [40] * 6)
    running = site.start_all(prompts, [40] * 6)
    eventually(lambda: site.status().scheduler.running == 6, 60)
    ray.get(site.scheduler.resize.remote(1))
    assert "draining" in site.states()
    assert [future.result(240) for future in running] == expected
    eventually(lambda: site.states() == ["ready"], 120)
    eventually(lambda: placements() == 1, 60)
    assert site.status().num_group_losses == losses  # a drain is no loss


def test_from_no_group_at_all_a_burst_waits_and_is_served(site: Site) -> None:
    """With what the last group ran, which was lost while it drained: it is not started again."""
    prompts = [(i + 3, 43) for i in range(2)]
    expected = site.undisturbed(prompts, [100] * 2)
    running = site.start_all(prompts, [100] * 2)
    eventually(lambda: site.status().scheduler.running == 2, 60)
    [victim, _] = site.status().groups[0].pids
    ray.get(site.scheduler.resize.remote(0))
    assert site.states() == ["draining"]
    os.kill(victim, signal.SIGKILL)
    seen = set()
    eventually(lambda: seen.update(states := site.states()) or states == [], 120)
    assert seen == {"draining"}
    eventually(lambda: placements() == 0, 60)

    assert not site.status().ready
    running += site.start_all([(i + 3, 45) for i in range(6)], [5] * 6)
    eventually(lambda: site.status().scheduler.waiting == 8, 60)
    ray.get(site.scheduler.resize.remote(1))
    assert [future.result(240) for future in running[:2]] == expected
    assert [len(future.result(240)) for future in running[2:]] == [5] * 6


def test_a_new_scheduler_takes_the_workers_over_and_gives_back_what_was_half_placed(site: Site) -> None:
    eventually(lambda: site.states() == ["ready"], 120)
    placement_group([{"GPU": 1}], name="site-group-7-f00", lifetime="detached")
    eventually(lambda: placements() == 2, 60)
    [kept] = site.status().groups
    before = site.status().scheduler_pid
    os.kill(before, signal.SIGKILL)
    eventually(lambda: site.states() == ["ready"], 60)  # as many as there were, not the two that it began with
    now = site.status()
    assert now.scheduler_pid != before
    assert (now.groups[0].pids, now.groups[0].phase) == (kept.pids, "")
    eventually(lambda: placements() == 1, 60)


def test_a_new_scheduler_keeps_the_number_of_groups_that_it_was_told(site: Site) -> None:
    """Even where fewer are left alive than that, or more: one was being drained."""
    before = site.status()
    assert [group.state for group in before.groups] == ["ready"]
    ray.get(site.scheduler.resize.remote(2))
    os.kill(before.scheduler_pid, signal.SIGKILL)
    eventually(lambda: site.states() == ["ready", "ready"], 180)
    assert before.groups[0].pids in [group.pids for group in site.status().groups]

    running = site.start_all([(i + 3, 49) for i in range(2)], [120] * 2)
    eventually(lambda: site.status().scheduler.running == 2, 60)
    ray.get(site.scheduler.resize.remote(1))
    assert sorted(site.states()) == ["draining", "ready"]
    os.kill(site.status().scheduler_pid, signal.SIGKILL)
    eventually(lambda: site.states() == ["ready"], 180)
    eventually(lambda: placements() == 1, 60)
    assert [len(future.result(240)) for future in running] == [120] * 2


def test_a_node_that_is_drained_lets_streams_finish_and_moves_the_rest(site: Site) -> None:
    prompts = [(i + 9, 1300 + i) for i in range(8)]
    lengths = [10, 250] * 4
    expected = site.undisturbed(prompts, lengths)
    before = site.status().scheduler.generation_tokens
    running = site.start_all(prompts, lengths)
    eventually(lambda: site.status().scheduler.generation_tokens >= before + 5 * len(prompts), 120)
    at_first = site.status()
    [leaving] = {node for group in at_first.groups for node in group.node_ids}
    drained = site.start(asyncio.to_thread(drain_node, leaving, "site", 6.0, print))
    eventually(lambda: sorted(site.states()) == ["draining", "starting"], 6)  # its place is taken elsewhere
    assert drained.result(60) == 0  # nothing was there any more when the time was up
    assert not any(leaving in group.node_ids for group in site.status().groups)
    assert [future.done() for future in running] == [True, False] * 4
    assert [future.result(240) for future in running] == expected
    now = site.status()
    assert [group.state for group in now.groups] == ["ready"]
    assert now.scheduler.num_migrations == at_first.scheduler.num_migrations + 4
    assert now.num_group_losses == at_first.num_group_losses  # a drain is no loss


@pytest.mark.nightly  # 20 s; the policy has tests of its own
def test_scaling_follows_a_burst_from_zero_and_back_to_zero(site: Site) -> None:
    config = site.config.model_copy(
        update={
            **{"name": "elastic", "tensor_parallel_size": 1, "gpus_per_group": 0, "accelerator_type": None},
            **{"groups": 1, "min_groups": 0, "max_groups": 2, "max_num_seqs": 4},
            **{"upscale_delay_s": 0.0, "downscale_delay_s": 1.0, "downscale_to_zero_delay_s": 2.0},
            **{"orphan_timeout_s": 1.0},
        }
    )
    scheduler = ensure_scheduler(config, read_model_info(demo.pull("smollm2-135m")), "cpu")

    def groups() -> list[str]:
        return [group.state for group in ray.get(scheduler.status.remote()).groups]

    eventually(lambda: groups() == [], 180)
    assert ray.get(scheduler.status.remote()).ready  # whoever comes is held, and served after a start
    stream = site.run(site.open("elastic"))
    prompts = [(i + 3, 47) for i in range(24)]
    running = [site.start(site.generate(prompt, 30, stream)) for prompt in prompts]
    eventually(lambda: len(groups()) == 2, 120)
    answers = [future.result(120) for future in running]
    assert [len(ids) for ids in answers] == [30] * 24
    eventually(lambda: groups() == [], 180)
    again = site.start(site.generate((3, 48), 200, stream))
    eventually(lambda: groups() == ["ready"], 180)
    again.cancel()
    pids = [ray.get(scheduler.status.remote()).scheduler_pid, *ray.get(scheduler.status.remote()).groups[0].pids]
    site.run(stream.close())  # the last router is gone, and there is no such application
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 120)
    assert "elastic-scheduler" not in ray.util.list_named_actors()


def test_a_model_that_cannot_be_loaded_is_named(site: Site, tmp_path: Any) -> None:
    """Its own application beside the other one: the first start fails, the reason is in the status, nothing is left."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_bytes((demo.pull("smollm2-135m") / file).read_bytes())
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    config = site.config.model_copy(
        update={"model": str(folder), "name": "broken", "groups": 1, "gpus_per_group": 0, "accelerator_type": None}
    )
    scheduler = ensure_scheduler(config, read_model_info(folder), "cpu")
    before = placements()
    eventually(lambda: any(group.error for group in ray.get(scheduler.status.remote()).groups), 180)
    assert "model.safetensors" in ray.get(scheduler.status.remote()).groups[0].error
    assert not ray.get(scheduler.status.remote()).ready
    ray.get(scheduler.stop.remote(0.0))
    ray.kill(scheduler)
    eventually(lambda: placements() <= before, 60)


def test_a_worker_that_is_stopped_while_it_starts_is_replaced(site: Site) -> None:
    """An application of its own, whose first worker never gets further than loading."""
    config = site.config.model_copy(
        update={
            **{"name": "stopped", "tensor_parallel_size": 1, "gpus_per_group": 0, "accelerator_type": None},
            **{"groups": 1, "step_timeout_s": 15.0},
        }
    )
    scheduler = ensure_scheduler(config, read_model_info(demo.pull("smollm2-135m")), "cpu")

    def group() -> Any:
        [group] = ray.get(scheduler.status.remote()).groups or [None]
        return group

    try:
        eventually(lambda: group() is not None and group().phase == "loading weights", 180)
        [stopped] = group().pids
        os.kill(stopped, signal.SIGSTOP)
        eventually(lambda: group().state == "ready", 180)
        assert group().num_starts == 2
        assert group().error == "a worker did not answer for 15 s while it was loading weights"
        assert not Path(f"/proc/{stopped}").exists()
    finally:
        ray.get(scheduler.stop.remote(0.0))
        ray.kill(scheduler)
