"""One rank as a Ray actor: Ray places it and watches it, its step loop lives in a thread on the channel.

The only module of this room that knows the workers; torch is imported in the actor's process alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import ray

from orcaserve.cluster.channel import BlockingClient, ChannelClosed, Endpoint
from orcaserve.cluster.config import Device, ServeConfig
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.wire import Done, Failed, Hello, Holds, Leave, Neighbour, Step, Timed, ToRank

if TYPE_CHECKING:
    from orcaserve.workers.worker import Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")


def find_model_here(model: str) -> str:
    """The directory of a model on this node, fetched or converted first where it must be. Raises WorkerError."""
    from orcaserve.workers.model_dir import find_model

    return str(find_model(model).resolve())


class WorkerActor:
    """A shell around workers.Worker. All of the worker's work is done by one thread of its own."""

    def __init__(self, config: ServeConfig, model: ModelInfo, device: Device, rank: int) -> None:
        self._config = config
        self._model = model
        self._device = device
        self._rank = rank
        self._worker: Worker | None = None
        self._num_blocks = 0
        self._warm = False
        self._failed = False  # in a step: the ranks may not agree any more on what comes next
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")
        threads = config.num_threads or max(1, (os.cpu_count() or 1) // config.tensor_parallel_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read by torch when it is imported, which is yet to come

    async def whereabouts(self) -> tuple[str, int]:
        """Node id and process id."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def find_model(self) -> None:
        """Have the model's files on this node; the other ranks are here too."""
        await self._in_thread(find_model_here, self._config.model)

    async def rendezvous(self) -> str:
        """Where rank 0 will meet the others."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    async def load(self, init_method: str) -> int:
        """Meet the other ranks and read the weights; returns the number of KV blocks that would fit here."""
        return await self._in_thread(self._load, init_method)

    async def allocate(self, num_blocks: int) -> None:
        assert self._worker is not None
        await self._in_thread(self._worker.allocate, num_blocks)
        self._num_blocks = num_blocks

    async def warm_up(self) -> None:
        assert self._worker is not None
        await self._in_thread(self._worker.warm_up)
        self._warm = True

    async def attach(self, endpoint: Endpoint, hello: Hello) -> int:
        """Forget all requests and take steps from the scheduler at `endpoint`; returns the number of KV blocks.

        A worker that still serves a former scheduler comes here once that one's channel is closed. What it has computed
        is told to the new one.
        """
        if self._worker is None or not self._warm:
            raise RuntimeError("not loaded yet")
        kept = await self._in_thread(self._worker.kept_kv)  # after the former scheduler's last step
        await self._in_thread(self._worker.reset)
        if self._failed:
            raise RuntimeError("a step failed here")
        hello = msgspec.structs.replace(hello, pool=self._worker.pool_file, kept=kept if self._rank == 0 else [])
        self._thread.submit(self._serve, endpoint, hello)
        return self._num_blocks

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _load(self, init_method: str) -> int:
        from orcaserve.workers.config import WorkerConfig
        from orcaserve.workers.worker import Worker

        options = self._config
        worker_config = WorkerConfig(
            model_dir=find_model_here(options.model),
            tensor_parallel_size=options.tensor_parallel_size,
            dtype=options.dtype,
            device=self._device,
            block_size=options.block_size,
            max_model_len=self._model.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            kv_cache_memory_bytes=options.kv_cache_memory,
            gpu_memory_utilization=options.gpu_memory_utilization,
            attention_backend=options.attention_backend,
            share_kv=options.group_range[1] > 1,
            num_threads=options.num_threads,
            num_speculative_tokens=options.num_speculative_tokens,
            enforce_eager=options.enforce_eager,
            torch_compile=options.torch_compile,
            grammar_compile_timeout_s=options.grammar_compile_timeout_s,
            max_grammar_bytes=options.max_grammar_memory,
            grammar_cache_bytes=options.grammar_cache_memory,
            step_timeout_s=options.step_timeout_s,
            cache_dir=str(options.kernel_cache_dir or ""),
        )
        self._worker = Worker(worker_config, self._rank, init_method)
        self._worker.load()
        return self._worker.num_kv_blocks()

    def _serve(self, endpoint: Endpoint, hello: Hello) -> None:
        """The step loop: until the scheduler is gone, lets go of us, or a step fails."""
        assert self._worker is not None
        link: BlockingClient[ToRank] = BlockingClient(endpoint, ToRank)
        try:
            link.send(hello)
            while not isinstance(message := link.recv(), Leave):
                if isinstance(message, Step):
                    self._step(link, message)
                elif isinstance(message, Neighbour):
                    self._hold(link, message)
                else:
                    self._worker.drop(message.group_id)
        except ChannelClosed:
            logger.warning("rank %d: the scheduler is gone; waiting for the next one", self._rank)
        except Exception as error:
            self._failed = True
            logger.exception("rank %d: a step failed", self._rank)
            link.send(Failed(f"{type(error).__name__}: {error}"))
        finally:
            link.close()

    def _step(self, link: BlockingClient[ToRank], step: Step) -> None:
        assert self._worker is not None
        began_s = time.monotonic()
        result = self._worker.step(step.plan)
        if step.traced:
            link.send(Timed(step.plan.step_id, began_s, time.monotonic()))
        if result is not None:
            link.send(Done(result))

    def _hold(self, link: BlockingClient[ToRank], neighbour: Neighbour) -> None:
        """Without an answer nobody counts on it: where it cannot be read, what is lost is computed again."""
        from orcaserve.workers.errors import PoolUnreadable

        assert self._worker is not None
        try:
            self._worker.hold(neighbour.group_id, neighbour.file)
        except PoolUnreadable as error:
            logger.warning("rank %d: group %d: %s", self._rank, neighbour.group_id, error)
        else:
            link.send(Holds(neighbour.group_id, neighbour.incarnation))
