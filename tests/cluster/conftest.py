"""The demo model's tokenizer, and live servers whose model is a Parrot (see live.py)."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def make_server(model: ModelInfo, codec: TextCodec) -> Iterator[Callable[..., LiveServer]]:
    """Starts servers that end with the module. Options of the Parrot, of AppConfig and of the scheduler by keyword."""
    with ExitStack() as stack:

        def make(config: AppConfig | None = None, parrot: dict[str, Any] | None = None, **options: Any) -> LiveServer:
            worker = Parrot(codec.tokenizer, model.eos_token_ids[0], 64, MAX_MODEL_LEN, **(parrot or {}))
            return stack.enter_context(LiveServer(model, worker, config, **options))

        yield make


@pytest.fixture(scope="module")
def server(make_server: Callable[..., LiveServer]) -> LiveServer:
    return make_server()
