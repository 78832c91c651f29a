"""Nodes appear for the groups that the load wants, and go when it has gone: Ray's own autoscaler on pretended nodes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from orcaserve.cluster.config import ServeConfig
from orcaserve.cluster.local import free_port
from orcaserve.cluster.model_info import read_model_info
from orcaserve.cluster.scheduler_actor import connect, ensure_scheduler
from orcaserve.engine.messages import GenerateRequest
from orcaserve.engine.sampling import SamplingParams
from orcaserve.loadtest.serving import processes_under
from orcaserve.workers import demo
from tests.waiting import eventually

pytestmark = pytest.mark.nightly
_STORE_BYTES = 80 * 2**20


@pytest.fixture
def ray_with_autoscaler() -> Iterator[str]:
    """The address of a head without GPUs, whose autoscaler starts nodes of one GPU each, four at most."""
    folder = Path(tempfile.mkdtemp(prefix="ra-", dir="/tmp"))  # sockets go there: the path must be short
    address = f"127.0.0.1:{free_port()}"
    config = {
        "cluster_name": "pretended",
        "max_workers": 4,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 0.1,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 4}, "node_config": {}, "max_workers": 0},
            "gpu": {
                "resources": {"CPU": 1, "GPU": 1, "object_store_memory": _STORE_BYTES},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 4,
            },
        },
        **{key: {} for key in ("auth", "docker", "file_mounts", "cluster_synced_files")},
        **{key: [] for key in ("initialization_commands", "setup_commands", "head_setup_commands")},
        **{key: [] for key in ("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")},
    }
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--include-dashboard=false"]
    command += [f"--port={address.rpartition(':')[2]}", "--node-ip-address=127.0.0.1", "--num-cpus=4", "--num-gpus=0"]
    command += [f"--object-store-memory={_STORE_BYTES}", f"--temp-dir={folder}"]
    command += [f"--autoscaling-config={folder / 'config.json'}"]
    environment = {
        **os.environ,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with (folder / "head.log").open("w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        eventually(lambda: "ray status" in (folder / "head.log").read_text() or head.poll() is not None, 60)
        assert head.poll() is None, (folder / "head.log").read_text()
        yield address
    finally:
        children = list(processes_under(head.pid))
        head.terminate()
        head.wait(30)
        for pid in children:
            eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists(), 30)  # type: ignore[misc]
        shutil.rmtree(folder, ignore_errors=True)


def num_gpu_nodes() -> int:
    return sum(node["Alive"] and node["Resources"].get("GPU", 0) > 0 for node in ray.nodes())


def test_nodes_come_with_a_burst_and_go_after_it(ray_with_autoscaler: str) -> None:
    ray.init(address=ray_with_autoscaler, namespace="tests", log_to_driver=False, logging_level="ERROR")
    try:
        asyncio.run(burst())
    finally:
        ray.shutdown()


async def burst() -> None:
    config = ServeConfig(
        name="elastic",
        device="cpu",
        gpus_per_group=1,
        min_groups=0,
        max_groups=2,
        dtype="float32",
        num_threads=1,
        max_num_seqs=4,
        kv_cache_memory="64MiB",
        upscale_delay_s=0.0,
        downscale_delay_s=2.0,
        downscale_to_zero_delay_s=4.0,
    )
    scheduler = ensure_scheduler(config, read_model_info(demo.pull(config.model)), "cpu")
    stream = connect("elastic")
    await stream.start()
    try:
        await until(lambda: num_gpu_nodes() == 0 and not ray.get(scheduler.status.remote()).groups, 180)

        async def generate(number: int) -> int:
            sampling = SamplingParams(max_tokens=40, seed=number, ignore_eos=True)
            deltas = await stream.submit(GenerateRequest(f"r{number}", (number + 3, 47), sampling))
            return sum([len(delta.token_ids) async for delta in deltas])

        answers = asyncio.gather(*(generate(number) for number in range(24)))
        await until(lambda: num_gpu_nodes() == 2, 120)
        assert await answers == [40] * 24
        await until(lambda: num_gpu_nodes() == 0, 120)
        assert (await stream.status()).ready  # asleep: the next one would be held and served
    finally:
        await stream.close()
        ray.get(scheduler.stop.remote(0.0))
        ray.kill(scheduler)


async def until(condition: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.2)
