"""`orcaserve serve`: everything on this machine (or on a Ray cluster that runs already), until it is told to stop."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from orcaserve.cluster.config import ServeConfig
from orcaserve.cluster.local import VITAL_PARTS, LocalRay, ended_parts, shield_ray_from_signals
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.ray_address import NAMESPACE, join_ray

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from orcaserve.cluster.wire import ClusterStatus

_POLL_S = 0.2
_WATCH_S = 1.0
_FRONT_DOOR_S = 120  # Ray Serve starts the proxy and the router; its own limit for the proxy is half of that
_LATE_STOP_S = 10.0  # for the scheduler to end its groups, when that took longer than the drain


class StartFailed(Exception):
    """The service could not be brought up; the message is for the operator."""


def run(config: ServeConfig, model: ModelInfo, say: Callable[[str], None]) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code. `say` shows progress."""
    started_s = time.monotonic()
    if not config.on_loopback and not config.wants_key:
        say(f"warning: {config.host} can be reached from other machines and there is no --api-key")
    local = None if config.ray_address else LocalRay()
    if local is not None:
        os.environ |= local.environment()
    _interrupt_on_signals()
    service = _Service(config, model, local, say)
    try:
        service.start()
        say(f"ready after {time.monotonic() - started_s:.1f} s")
        print(_greeting(config, model), flush=True)
        if local is not None:
            local.remember_processes()  # without the raylet its workers would be nobody's children
        while local is None or not ended_parts() & VITAL_PARTS:
            _stop_if_asked()
            time.sleep(_WATCH_S)
        say("error: Ray has ended, and the service with it")
        return 1
    except KeyboardInterrupt:
        say("stopping: running requests get a moment to finish")
        return 0
    finally:
        _ignore_signals()
        service.stop()


class _Service:
    """What was started so far, so that a stop at any moment ends just that."""

    def __init__(
        self, config: ServeConfig, model: ModelInfo, local: LocalRay | None, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._model = model
        self._local = local
        self._say = say
        self._scheduler: ActorHandle | None = None

    def start(self) -> None:
        """Returns when a request would be answered. Scheduler and workers start beside Ray Serve."""
        config = self._config
        import ray

        if self._local is None:
            assert config.ray_address is not None
            join_ray(config.ray_address)
        else:
            self._say("starting Ray")
            shield_ray_from_signals()
            ray.init(
                address="local",  # not one that RAY_ADDRESS or `ray start` have left here
                num_cpus=max(os.cpu_count() or 1, config.groups * config.tensor_parallel_size + 1),
                include_dashboard=False,
                object_store_memory=100 * 2**20,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
            )
        self._say(f"Ray is at {ray.get_runtime_context().gcs_address}")
        _interrupt_on_signals()  # ray.init has put its own handler there
        from orcaserve.cluster.scheduler_actor import ensure_scheduler, resolve_device

        self._scheduler = ensure_scheduler(config, self._model, resolve_device(config.device))
        self._start_serve()
        self._wait_ready()

    def stop(self) -> None:
        """Drain, end our own actors, and the whole of Ray if it is ours."""
        import ray

        if self._local is not None:
            self._local.remember_processes()
        try:
            if self._scheduler is not None:
                self._stop_application(self._scheduler)
            ray.shutdown()
        finally:
            if self._local is not None:
                self._local.close()

    def _start_serve(self) -> None:
        self._say("starting Ray Serve")
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.schema import LoggingConfig

        from orcaserve.cluster.app import build

        config = self._config
        quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)  # the router writes its own lines
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it would say "ready" before the model is
        http = {"host": config.host, "port": config.port}
        try:
            serve.start(http_options=http, logging_config=quiet)
        except RayError as error:
            self._say(f"Ray Serve's HTTP proxy did not start, waiting for its next: {_last_line(str(error))}")
            serve.start(http_options=http, logging_config=quiet)  # finds the controller, which starts another proxy
        app = build(config.model_dump(mode="json"))
        try:
            serve.run(app, name=config.name, route_prefix="/", logging_config=quiet)
        except (RuntimeError, TimeoutError) as error:  # the first when routers fail, the second when the proxy does
            routers = serve.status().applications[config.name].deployments["router"].message
            raise StartFailed(f"the routers did not start: {_last_line(routers or str(error))}") from None

    def _wait_ready(self) -> None:
        """Show what the groups are doing until the front door says ready."""
        shown = ""
        answers_by_s = 0.0
        while True:
            _stop_if_asked()
            status = self._status()
            for group in status.groups:
                if group.state == "dead" and not any(g.state == "ready" for g in status.groups):
                    raise StartFailed(group.error)
            phases = ", ".join(f"group {g.group_id}: {g.phase or g.state}" for g in status.groups if g.state != "ready")
            if phases and phases != shown:
                self._say(phases)
                shown = phases
            if status.ready:
                answers_by_s = answers_by_s or time.monotonic() + _FRONT_DOOR_S
                if _answers(f"{_url(self._config)}/ready"):
                    return
                if time.monotonic() > answers_by_s:
                    raise StartFailed(f"the model is loaded, but HTTP did not answer within {_FRONT_DOOR_S} s")
            time.sleep(_POLL_S)

    def _status(self) -> ClusterStatus:
        import ray

        assert self._scheduler is not None
        status: ClusterStatus = ray.get(self._scheduler.status.remote(), timeout=60)  # type: ignore[assignment]
        return status

    def _stop_application(self, scheduler: ActorHandle) -> None:
        from ray.exceptions import RayError

        drain_s = self._config.drain_timeout_s
        stopped: Any = scheduler.stop.remote(drain_s)
        try:
            if not self._answer(stopped, drain_s + 2):
                self._say(f"some requests had not finished after {drain_s:g} s and were ended with an error")
                time.sleep(0.3)  # so that the routers can tell their clients
        except RayError as error:
            self._say(f"the scheduler did not answer: {type(error).__name__}")
        except ConnectionError as error:
            self._say(str(error))
        if self._local is None:
            self._leave_cluster(scheduler, stopped)

    def _leave_cluster(self, scheduler: ActorHandle, stopped: Any) -> None:
        """A Ray that is not ours goes on, but nothing of the application may, however late its parts answer.

        A scheduler that has begun to stop serves nobody any more, and the next start would find it.
        """
        import ray
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            with contextlib.suppress(RayServeException):  # there is no Ray Serve yet
                serve.delete(self._config.name)
        except (RayError, TimeoutError) as error:
            self._say(f"Ray Serve is left to delete the application by itself: {type(error).__name__}")
        try:
            ray.wait([stopped], timeout=_LATE_STOP_S)
            ray.kill(scheduler)
        except RayError as error:
            self._say(f"the scheduler is left to end by itself: {type(error).__name__}")

    def _answer(self, call: Any, within_s: float) -> Any:
        """As ray.get, but it does not wait for a Ray that is gone or going: that is a ConnectionError.

        A raylet that was told to end takes ten seconds for it; the least of its companions goes at once.
        """
        import ray

        until_s = time.monotonic() + within_s
        while not ray.wait([call], timeout=_POLL_S)[0] and time.monotonic() < until_s:
            if self._local is not None and ended_parts():
                raise ConnectionError("Ray was ended before us, and the running requests with it")
        return ray.get(call, timeout=0)


_asked = threading.Event()  # by a signal, to stop


def _interrupt_on_signals() -> None:
    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        _asked.set()
        raise KeyboardInterrupt

    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, interrupt)


def _stop_if_asked() -> None:
    """What a signal raises is lost where it meets a finalizer or a library that drops errors."""
    if _asked.is_set():
        raise KeyboardInterrupt


def _ignore_signals() -> None:
    """While stopping, which takes seconds: an impatient second Ctrl-C must not leave processes behind."""
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_IGN)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _url(config: ServeConfig) -> str:
    host = "127.0.0.1" if config.host in ("0.0.0.0", "localhost") else config.host
    return f"http://{host}:{config.port}"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _greeting(config: ServeConfig, model: ModelInfo) -> str:
    body = {
        "model": model.name,
        "messages": [{"role": "user", "content": "What is the capital of Germany?"}],
        "temperature": 0,
    }
    key = ' -H "Authorization: Bearer $ORCASERVE_API_KEY"' if config.wants_key else ""
    return (
        f"orcaserve serves {model.name} at {_url(config)}/v1; try:\n"
        f"curl {_url(config)}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
    )
