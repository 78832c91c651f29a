"""`orcaserve status`, `chat`, `trace` and `drain`: what one does with a service that runs. Imports are light."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from orcaserve.cluster.cli_types import number
from orcaserve.cluster.client_base import DEFAULT_URL

Url = Annotated[str, typer.Option(envvar="ORCASERVE_URL", help="Base URL of the service.")]
ApiKey = Annotated[str, typer.Option(envvar="ORCASERVE_API_KEY", help="Bearer key.")]

WATCH_EVERY_S = 1.0


def status(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON instead of a table.")] = False,
    watch: Annotated[bool, typer.Option(help="Go on showing it, until Ctrl-C.")] = False,
) -> None:
    """Groups, slots, KV blocks and queue of a service that runs."""
    from rich.console import Console
    from rich.live import Live

    from orcaserve.cluster.client import Client
    from orcaserve.cluster.client_retry import RetryPolicy
    from orcaserve.cluster.status_table import StatusTable

    with _told(), Client(url, api_key=api_key or None, timeout=10.0, retry=RetryPolicy(max_retries=0)) as client:
        if as_json:
            while True:
                print(client.cluster_status().model_dump_json(), flush=True)
                if not watch:
                    return
                time.sleep(WATCH_EVERY_S)
        table = StatusTable(time.monotonic)
        console = Console()
        shown = table.of(client.cluster_status())
        if not watch:
            console.print(shown)
            return
        with Live(shown, console=console, auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_EVERY_S)
                live.update(table.of(client.cluster_status()), refresh=True)


def chat(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    model: Annotated[str, typer.Option(help="Served name; empty: the server's.")] = "",
    message: Annotated[str, typer.Option("--message", "-m", help="Ask this and end; else the terminal asks.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 512,
    temperature: Annotated[float, number("0: the likeliest answer, always the same.", 0.0)] = 0.0,
) -> None:
    """Talk to a model: one message, or line by line until Ctrl-D."""
    from orcaserve.cluster.client import Client

    options: Any = {"max_tokens": max_tokens, "temperature": temperature} | ({"model": model} if model else {})
    with _told(), Client(url, api_key=api_key or None) as client:
        if message:
            if not _say(client, [{"role": "user", "content": message}], options):
                _fail("the answer is empty")
            return
        talk: list[dict[str, str]] = []
        while line := _next_line():
            talk.append({"role": "user", "content": line})
            talk.append({"role": "assistant", "content": _say(client, talk, options)})


def trace(
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; Perfetto and Chrome open it.")],
    seconds: Annotated[float, number("How long to watch.", 0.1, 60.0)] = 5.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Record every step of the next seconds: plan, send, forward, sample, receive, publish, on scheduler and ranks."""
    import httpx

    from orcaserve.cluster.client_errors import error_of, transport_errors

    if not output.parent.is_dir() or output.is_dir():
        raise typer.BadParameter(f"--output: {output} is no file in a directory that is there")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with _told():
        with transport_errors():
            answer = httpx.get(
                f"{url.rstrip('/')}/trace", params={"seconds": seconds}, headers=headers, timeout=seconds + 20
            )
        if not answer.is_success:
            raise error_of(answer)
    output.write_bytes(answer.content)
    num_steps = sum(event.get("name") == "plan" and event["ph"] == "X" for event in answer.json()["traceEvents"])
    print(f"{num_steps} steps in {output}", file=sys.stderr)


def drain(
    timeout: Annotated[float, number("Seconds; what runs longer moves just before.", 0.0)] = 120.0,
    name: Annotated[str, typer.Option(help="Of the application on the Ray cluster.")] = "orcaserve",
    ray_address: Annotated[str, typer.Option(envvar="RAY_ADDRESS", help="The Ray cluster of this node.")] = "auto",
) -> None:
    """Before this node goes: keep new work away from it, and wait until what it has is done or has moved."""
    from orcaserve.cluster.drain import drain_this_node
    from orcaserve.cluster.ray_address import NoRay

    try:
        left = drain_this_node(ray_address, name, timeout, _tell)
    except NoRay as error:
        _fail(str(error))
    if left:
        _fail(f"{left} groups and streams were still here after {timeout:g} s")


def _next_line() -> str:
    """What the user types; nothing at the end of the input."""
    try:
        line = ""
        while not line:
            line = input("> " if sys.stdin.isatty() else "").strip()
        return line
    except EOFError:
        return ""


def _say(client: Any, talk: list[dict[str, str]], options: Any) -> str:
    text = ""
    for chunk in client.stream_chat(talk, resume=True, **options):
        piece = chunk.text if text else chunk.text.lstrip()
        text += piece
        print(piece, end="", flush=True)
    print(flush=True)
    return text


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What went wrong with the server is one line, exit code 1; Ctrl-C is an end like any other."""
    from orcaserve.cluster.client_errors import OrcaserveError

    try:
        yield
    except OrcaserveError as error:
        _fail(str(error) or type(error).__name__)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _tell(text: str) -> None:
    print(f"orcaserve: {text}", file=sys.stderr, flush=True)


def _fail(text: str) -> None:
    _tell(f"error: {text}")
    raise typer.Exit(1)
