"""The fault cases that need no particular model, against `orcaserve serve`: Ray, HAProxy and the real model included.

ORCASERVE_URL points them at a server that runs already, wherever that is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from orcaserve.cluster.model_info import ModelInfo
from orcaserve.loadtest.serving import Serving
from tests.cluster.live import LiveServer
from tests.cluster.test_api_openai import (  # noqa: F401  # collected here too, with this module's server
    client,
    test_models_and_usage_are_theirs_too,
    test_their_types_and_ours_accept_every_chat_object,
    test_their_types_and_ours_accept_every_completion_object,
)
from tests.cluster.test_case_bodies import (  # noqa: F401
    test_case_04_bodies_that_are_no_object,
    test_case_04_errors_do_not_echo_the_input,
    test_case_04_without_content_type,
    test_case_05_context_length,
    test_case_07_empty_prompts,
    test_lone_surrogates_are_refused,
)
from tests.cluster.test_case_fields import (  # noqa: F401
    test_fields_that_ask_for_nothing_pass,
    test_tool_turns_are_refused,
    test_unknown_fields_are_named_in_a_header,
    test_unknown_models,
    test_what_is_not_supported_is_refused_by_name,
)
from tests.cluster.test_case_load import (  # noqa: F401
    test_case_29_compressed_bodies_are_refused,
    test_case_38_memory_stays_where_it_is,
    test_unknown_routes_and_methods,
)
from tests.cluster.test_case_parameters import (  # noqa: F401
    test_case_08_logprobs_of_the_wrong_kind,
    test_case_08_top_logprobs,
    test_case_09_logit_bias,
    test_case_12_parameters_out_of_range,
    test_case_13_bad_seeds,
    test_case_13_good_seeds,
    test_case_14_bad_salts,
    test_case_22_deep_schemas,
    test_case_22_response_format,
    test_case_22_structured_outputs,
    test_case_38_n,
)
from tests.cluster.test_case_security import test_case_37_no_url_is_opened  # noqa: F401
from tests.cluster.test_case_streaming import (  # noqa: F401
    test_case_03_stream_options_without_stream,
    test_case_03_usage_only_when_asked_for,
    test_streams_and_whole_answers_agree_for_each_choice,
)
from tests.waiting import eventually

pytestmark = pytest.mark.nightly

CHAT: list[Any] = [{"role": "user", "content": "What is the capital of Germany?"}]


class Remote(LiveServer):
    """Only what the tests ask of one: its address and its short cuts."""

    def __init__(self, url: str, model: ModelInfo) -> None:
        self.url = url
        self.model = model
        self.client = httpx.Client(base_url=url, timeout=60)

    def until_idle(self, within_s: float = 10.0) -> None:
        def idle() -> bool:
            scheduler = self.client.get("/cluster").json()["scheduler"]
            return scheduler["running"] == scheduler["waiting"] == 0

        eventually(idle, within_s)


@pytest.fixture(scope="module")
def server(model: ModelInfo) -> Iterator[LiveServer]:
    serving = None
    url = os.environ.get("ORCASERVE_URL", "")
    if not url:
        serving = Serving("smollm2-135m", "--max-model-len", str(model.max_model_len))
        serving.wait_ready()
        url = serving.url
    remote = Remote(url, model)
    try:
        yield remote
        remote.until_idle()
    finally:
        remote.client.close()
        if serving is not None:
            serving.stop()


def test_the_official_client(client: openai.OpenAI, server: LiveServer) -> None:  # noqa: F811
    name = server.model.name
    answer = client.chat.completions.create(
        model=name, messages=CHAT, temperature=0, n=2, logprobs=True, top_logprobs=2
    )
    for choice in answer.choices:
        assert choice.message.content == "The capital of Germany is Berlin."
        assert choice.logprobs is not None
        assert "".join(entry.token for entry in choice.logprobs.content or ()).startswith(choice.message.content)
    stream = client.chat.completions.create(model=name, messages=CHAT, temperature=0, stream=True, stop=["Berlin"])
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The capital of Germany is "
    assert chunks[-1].choices[0].finish_reason == "stop"
    text = client.completions.create(model=name, prompt=["Count: 1, 2, 3,", "A, B, C,"], max_tokens=8, temperature=0)
    assert len(text.choices) == 2
    assert all(choice.text for choice in text.choices)


def test_a_schema_binds_the_real_model(client: openai.OpenAI, server: LiveServer) -> None:  # noqa: F811
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Berlin", "Bonn"]}, "big": {"type": "boolean"}},
        "required": ["name", "big"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=server.model.name,
        messages=CHAT,
        max_completion_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )
    said = json.loads(answer.choices[0].message.content or "")
    assert said["name"] in ("Berlin", "Bonn")
    assert isinstance(said["big"], bool)


def test_posts_that_time_out_leave_nothing(server: LiveServer) -> None:
    """Behind HAProxy as well."""
    for _ in range(16):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 480, "ignore_eos": True}, timeout=0.1
            )
    server.until_idle()
