"""Where a drill takes place: a server of its own, on this machine's Ray or on a Ray of several pretended nodes."""

from __future__ import annotations

import os
import random
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from orcaserve.loadtest.faults import Injector
from orcaserve.loadtest.serving import Serving

_OPTIONS = (
    *("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--routers", "2", "--drain-timeout-s", "1"),
    *("--kv-cache-memory", "300MiB", "--max-num-batched-tokens", "256", "--max-num-seqs", "32"),
    *("--step-timeout-s", "20"),  # also how long a worker that is stopped while it starts goes unnoticed
)
_STORE_BYTES = 80 * 2**20


class Nodes:
    """A Ray of a head and `num_nodes` nodes for one group each; everything is a child of this process."""

    def __init__(self, num_nodes: int) -> None:
        os.environ |= {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        from ray.cluster_utils import Cluster

        from orcaserve.cluster.scheduler_actor import NODE_RESOURCE

        # The scheduler sits with the routers, as deploy/ has it: were it on a node that is lost, only Ray's heartbeats
        # would notice, after 15 s.
        head = {"num_cpus": 8, "resources": {NODE_RESOURCE: 1}, "object_store_memory": _STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: list[Any] = [self._add() for _ in range(num_nodes)]
        # Later ones come from a thread, where Ray cannot set its signal handlers: `close` ends them.
        self._cluster._shutdown_at_exit = False

    @property
    def address(self) -> str:
        return self._cluster.address

    def _add(self) -> Any:
        """A node that only a group can use."""
        return self._cluster.add_node(
            num_cpus=0, num_gpus=1, resources={"accelerator_type:H100": 1}, object_store_memory=_STORE_BYTES
        )

    def lose_one(self) -> None:
        """The node is gone at once with all that it runs; a new one comes in its place."""
        node = self._nodes.pop(0)
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes.append(self._add())

    def close(self) -> None:
        self._cluster.shutdown()


class Place(msgspec.Struct, frozen=True):
    url: str
    injector: Injector


@contextmanager
def drill_place(model: str, groups: int, num_nodes: int, url: str, pid: int, seed: int) -> Iterator[Place]:
    """A server to be struck: one that runs already, or one that is started and stopped here, also on a SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rng = random.Random(seed + 1)
    if url:
        yield Place(url, Injector(pid, rng))
    elif not num_nodes:
        with _served(model, "--groups", str(groups)) as serving:
            yield Place(serving.url, Injector(serving.process.pid, rng))
    else:
        nodes = Nodes(num_nodes)
        try:
            options = ("--groups", str(num_nodes), "--gpus-per-group", "1", "--accelerator-type", "H100")
            with _served(model, "--ray-address", nodes.address, *options) as serving:
                yield Place(serving.url, Injector(os.getpid(), rng, nodes.lose_one))
        finally:
            nodes.close()


@contextmanager
def _served(model: str, *options: str) -> Iterator[Serving]:
    serving = Serving(model, *_OPTIONS, *options)
    try:
        serving.wait_ready(300)
        yield serving
    finally:
        serving.stop()
