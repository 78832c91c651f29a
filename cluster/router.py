"""One replica of the router: it finds or makes the application's scheduler and puts the HTTP surface before it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orcaserve.cluster.app import Asgi, Surface, log_beside_serve
from orcaserve.cluster.config import ServeConfig
from orcaserve.cluster.local import keep_replica_on_loopback
from orcaserve.cluster.model_info import read_model_info
from orcaserve.cluster.scheduler_actor import connect, ensure_scheduler, resolve_device
from orcaserve.cluster.worker_actor import find_model_here


class Router:
    """Ray Serve calls the constructor, then asks for the ASGI application."""

    def __init__(self, config: ServeConfig) -> None:
        self._at_end = AsyncExitStack()  # Serve calls the destructor even where this raises
        if ray.util.get_node_ip_address() == "127.0.0.1":
            keep_replica_on_loopback()
        model = read_model_info(find_model(config.model), config.served_model_name, config.max_model_len)
        ensure_scheduler(config, model, resolve_device(config.device))
        engine = connect(config.name)
        self._surface = Surface(config, model, engine, behind_serve=True)
        self._at_end.push_async_callback(self._surface.close)
        self._at_end.push_async_callback(engine.close)
        starting = asyncio.get_running_loop().create_task(engine.start())
        self._at_end.callback(starting.cancel)
        log_beside_serve()

    def __serve_build_asgi_app__(self) -> Asgi:
        return self._surface.asgi

    async def __del__(self) -> None:
        """Hang up and end the helpers. Ray Serve awaits this when it stops the replica."""
        await self._at_end.aclose()


def find_model(model: str) -> Path:
    """Its directory on this node. What is no directory yet is left to a task: that may bring torch into its process."""
    if Path(model).is_dir():
        return Path(model)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    task = ray.remote(find_model_here).options(num_cpus=0, scheduling_strategy=here)
    return Path(ray.get(task.remote(model)))
