"""The demo model's tokenizer, and live servers whose model is a Parrot (see live.py)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from orcaserve.cluster.app_config import AppConfig
from orcaserve.cluster.model_info import ModelInfo, read_model_info
from orcaserve.cluster.text import TextCodec
from orcaserve.workers.demo import pull
from tests.cluster.live import LiveServer
from tests.cluster.parrot import Parrot

MAX_MODEL_LEN = 512


@pytest.fixture(scope="session")
def model() -> ModelInfo:
    return read_model_info(pull("smollm2-135m"), max_model_len=MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def codec(model: ModelInfo) -> TextCodec:
    return TextCodec.from_file(model.tokenizer_file)


def parrot_server(
    model: ModelInfo, codec: TextCodec, config: AppConfig | None, parrot: dict[str, Any] | None, **options: Any
) -> LiveServer:
    """Options of the Parrot, of AppConfig and, by keyword, of the scheduler."""
    worker = Parrot(codec.tokenizer, model.eos_token_ids[0], 64, MAX_MODEL_LEN, **(parrot or {}))
    return LiveServer(model, worker, config, **options)


@pytest.fixture(scope="module")
def make_server(model: ModelInfo, codec: TextCodec) -> Iterator[Callable[..., LiveServer]]:
    """Starts servers that end with the module."""
    with ExitStack() as stack:

        def make(config: AppConfig | None = None, parrot: dict[str, Any] | None = None, **options: Any) -> LiveServer:
            return stack.enter_context(parrot_server(model, codec, config, parrot, **options))

        yield make


@pytest.fixture(scope="session")
def server(model: ModelInfo, codec: TextCodec) -> Iterator[LiveServer]:
    """One with the default options, for all tests that leave it as it was."""
    with parrot_server(model, codec, None, None) as server:
        yield server


@pytest.fixture
def neighbour(server: LiveServer) -> Iterator[None]:
    """A good stream runs beside every bad request, and must not notice."""
    texts: list[str] = []

    def stream() -> None:
        texts.extend(server.events("/v1/completions", {"prompt": "SAY:a quiet neighbour", "max_tokens": 30}))

    thread = threading.Thread(target=stream)
    thread.start()
    yield
    thread.join(30)
    assert "".join(json.loads(t)["choices"][0]["text"] for t in texts[:-1]) == "a quiet neighbour"
    assert server.client.get("/health").status_code == 200
    server.until_idle()
