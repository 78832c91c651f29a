"""The router: a Ray Serve deployment around the HTTP surface. `build` is for `serve.run` and Serve's config files:

applications:
  - name: orcaserve
    import_path: orcaserve.cluster.app:build
    args: {model: ..., tensor_parallel_size: 4, ...}   # the flags of `orcaserve serve`
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from orcaserve.cluster.app_config import AppConfig
from orcaserve.cluster.app_edge import Edge, Receive, Scope, Send
from orcaserve.cluster.app_generate import GENERATIONS, Generation, Generator
from orcaserve.cluster.app_metrics import RequestMetrics
from orcaserve.cluster.app_prepare import Preparer
from orcaserve.cluster.app_routes import create_routes
from orcaserve.cluster.app_run import Engine
from orcaserve.cluster.app_trace import Tracer, otlp_processor
from orcaserve.cluster.auth import KeyRing, read_keys, read_tenants
from orcaserve.cluster.chat import ChatTemplate
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.text import TextCodec
from orcaserve.cluster.text_grammar import GrammarChecker

if TYPE_CHECKING:
    from ray.serve import Application

Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


class Surface:
    """Everything of a router but Ray: the ASGI application, and what must be closed with it."""

    def __init__(self, config: AppConfig, model: ModelInfo, engine: Engine, *, behind_serve: bool = False) -> None:
        tenants = read_tenants(config.tenants_file) if config.tenants_file is not None else []
        more_keys = read_keys(config.api_key_file) if config.api_key_file is not None else []
        keys = KeyRing([*config.api_key, *more_keys], tenants)
        self.codec = TextCodec.from_file(model.tokenizer_file)
        self.grammars = GrammarChecker(model.tokenizer_file, model.vocab_size, config.grammar_timeout_s)
        template = None
        if model.chat_template is not None:
            template = ChatTemplate(model.chat_template, model.special_tokens)
        preparer = Preparer(model, self.codec, template, self.grammars, config)
        processor = otlp_processor(config.otlp_endpoint) if config.otlp_endpoint is not None else None
        self.metrics = RequestMetrics(model.name, engine.report)
        self.generator = Generator(config, preparer, engine, self.metrics, Tracer(processor, model.name))
        self.routes = create_routes(self.generator)
        self.asgi: Asgi = Edge(self._dispatch, config, keys, self.metrics, behind_serve)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generations go straight to their work: the framework's way there is a third of a request's cost."""
        kind = GENERATIONS.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        if kind is None:
            await self.routes(scope, receive, send)
        else:
            await Generation(self.generator, kind)(scope, receive, send)

    async def close(self) -> None:
        """End the helper processes, and send the last spans."""
        self.metrics.close()
        await self.grammars.close()
        await asyncio.to_thread(self.generator.tracer.close)


def build(args: dict[str, Any]) -> Application:
    """The Serve application for these options (those of `orcaserve serve`, with underscores)."""
    from ray import serve

    from orcaserve.cluster.config import ServeConfig
    from orcaserve.cluster.router import Router

    config = ServeConfig.load(args)
    return serve.deployment(
        name="router",
        num_replicas=config.routers,
        max_ongoing_requests=100_000,  # the scheduler's bounded queue refuses, with a reason and a Retry-After
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=5,
        graceful_shutdown_timeout_s=config.drain_timeout_s + 5,
    )(serve.ingress()(Router)).bind(config)


def log_beside_serve() -> None:
    """One line a request in Ray Serve's log file of this replica.

    Not by way of stderr: Serve looks through the stack for each line there, and drops it when its own level is WARNING.
    """
    access = logging.getLogger("orcaserve.access")
    for handler in logging.getLogger("ray.serve").handlers:
        access.addHandler(handler)
    access.setLevel(logging.INFO)
    access.propagate = False
