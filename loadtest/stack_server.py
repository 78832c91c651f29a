"""The servers that `stack` compares, each in a process of its own: `python -m orcaserve.loadtest.stack_server KIND`.

orcaserve      real routers, scheduler, channels and streams over Ray Serve and HAProxy; ranks that compute nothing
ray-generator  what a plain Ray Serve app does: a streaming generator call per request, Serve's default proxy
uvicorn        the floor: one asyncio app that yields ready-made chunks
Prints a JSON line with the process ids by part when it answers; ends on SIGINT or SIGTERM, and when its standard input
ends: whoever measured is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

CHUNK = json.dumps(
    {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": 0,
        "model": "null",
        "choices": [{"index": 0, "text": " word", "finish_reason": None}],
    },
    separators=(",", ":"),
)


MODELS = b'{"data":[{"id":"null"}]}'


def _event(payload: str) -> bytes:
    return b"data: " + payload.encode() + b"\n\n"


def _last_events(num_prompt_tokens: int, num_tokens: int) -> bytes:
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens}
    return _event(json.dumps({"choices": [], "usage": usage})) + _event("[DONE]")


def bare_app(step_s: float) -> Callable[[dict[str, Any], Receive, Send], Awaitable[None]]:
    """ASGI: streams `max_tokens` ready-made chunks, one a turn of the event loop, as the simplest server would."""

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message.get("body", b"")
        is_json = [(b"content-type", b"application/json")]
        if scope["method"] == "GET":
            await send({"type": "http.response.start", "status": 200, "headers": is_json})
            await send({"type": "http.response.body", "body": MODELS})
            return
        request = json.loads(body)
        is_stream = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": is_stream})
        chunk = _event(CHUNK)
        for _ in range(request["max_tokens"]):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(step_s)
        last = _last_events(len(request["prompt"]), request["max_tokens"])
        await send({"type": "http.response.body", "body": last})

    return app


def run_uvicorn(port: int, step_s: float) -> None:
    import uvicorn

    config = uvicorn.Config(bare_app(step_s), host="127.0.0.1", port=port, log_level="error", access_log=False)
    server = uvicorn.Server(config)
    _when_deserted(lambda: setattr(server, "should_exit", True))
    _say({"server": [os.getpid()]})
    with contextlib.suppress(KeyboardInterrupt):  # it hands a signal on when it has ended
        server.run()


def run_ray_generator(port: int, step_s: float) -> None:
    """A router deployment that asks an engine deployment for one streaming generator per request."""
    from orcaserve.cluster.local import ROUTER_ENVIRONMENT, LocalRay

    local = LocalRay()
    own = {name for name in local.environment() if "PROXY" in name} | ROUTER_ENVIRONMENT.keys()
    os.environ |= {name: value for name, value in local.environment().items() if name not in own}
    import ray
    from ray import serve
    from ray.serve.schema import LoggingConfig
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse

    @serve.deployment(max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0})
    class NullEngine:
        async def generate(self, num_tokens: int) -> AsyncIterator[str]:
            for _ in range(num_tokens):
                yield CHUNK
                await asyncio.sleep(step_s)

    @serve.deployment(max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0})
    class Front:
        def __init__(self, engine: Any) -> None:
            self._engine = engine.options(stream=True)

        async def __call__(self, request: Request) -> Response:
            if request.method == "GET":
                return Response(MODELS, media_type="application/json")
            body = await request.json()

            async def events() -> AsyncIterator[bytes]:
                async for chunk in self._engine.generate.remote(body["max_tokens"]):
                    yield _event(chunk)
                yield _last_events(len(body["prompt"]), body["max_tokens"])

            return StreamingResponse(events(), media_type="text/event-stream")

    try:
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
        )
        quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)  # as `orcaserve serve` has it
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=quiet)
        application = Front.bind(NullEngine.bind())  # type: ignore[attr-defined]
        serve.run(application, name="null", route_prefix="/", logging_config=quiet)
        _say({})
        _wait()
    finally:
        local.remember_processes()
        ray.shutdown()
        local.close()


def run_orcaserve(port: int, model: str, groups: int, routers: int, step_s: float) -> None:
    """The real application with a scheduler whose ranks compute nothing."""
    from orcaserve.cluster.config import ServeConfig
    from orcaserve.cluster.local import LocalRay
    from orcaserve.cluster.model_info import read_model_info

    local = LocalRay()
    os.environ |= local.environment()
    import ray
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from orcaserve.cluster.app import build
    from orcaserve.loadtest.stack_null import start_null_scheduler

    config = ServeConfig.load({"model": model, "port": port, "groups": groups, "routers": routers, "max_num_seqs": 256})
    try:
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            namespace="orcaserve",
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
        )
        pids = start_null_scheduler(config, read_model_info(model), step_s)
        quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)  # as `orcaserve serve` has it
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=quiet)
        app = build(config.model_dump(mode="json"))
        serve.run(app, name=config.name, route_prefix="/", logging_config=quiet)
        _say(pids)
        _wait()
    finally:
        local.remember_processes()
        ray.shutdown()
        local.close()


def _say(pids: dict[str, list[int]]) -> None:
    sys.stdout.write(json.dumps({"pids": pids}) + "\n")
    sys.stdout.flush()


def _wait() -> None:
    """Until a signal; Ray has put its own handlers there, so ours go on top."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    _when_deserted(stop.set)
    stop.wait()


def _when_deserted(end: Callable[[], None]) -> None:
    """Call `end` once our standard input has ended: a measurement that was killed could not stop its server.

    No signal to ourselves: one that comes while uvicorn takes the handlers over has been lost.
    """

    def watch() -> None:
        sys.stdin.buffer.read()
        end()

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("orcaserve", "ray-generator", "uvicorn"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=0.0)
    args = parser.parse_args()
    if args.kind == "uvicorn":
        run_uvicorn(args.port, args.step_ms / 1e3)
    elif args.kind == "ray-generator":
        run_ray_generator(args.port, args.step_ms / 1e3)
    else:
        run_orcaserve(args.port, args.model, args.groups, args.routers, args.step_ms / 1e3)


if __name__ == "__main__":
    main()
