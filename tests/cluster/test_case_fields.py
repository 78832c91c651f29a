"""Fields that are unknown, not supported, or somebody else's: named in a header, or refused by name."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from orcaserve.cluster.protocol import GenerationRequest
from orcaserve.cluster.protocol_chat import ChatCompletionRequest
from orcaserve.cluster.protocol_completions import CompletionRequest
from tests.cluster.live import LiveServer
from tests.cluster.refusals import CHAT, refused

README = (Path(__file__).parents[2] / "README.md").read_text()
# OpenAI's fields that change no answer: accepted, and named in the header.
SAY_NOTHING = {"metadata", "parallel_tool_calls", "safety_identifier"} | {
    f"prompt_cache_{name}" for name in ("key", "options", "retention")
}

pytestmark = pytest.mark.usefixtures("neighbour")


def test_unknown_fields_are_named_in_a_header(server: LiveServer) -> None:
    response = server.chat("SAY:x", max_tokens=4, frobnicate=1, metadata={"a": "b"}, **{"bad\r\nname": 1})
    assert response.status_code == 200
    assert response.headers["x-orcaserve-ignored-fields"] == "frobnicate, metadata, bad??name"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "high"),
        ("web_search_options", {}),
        ("prediction", {"type": "content"}),
        ("truncation_side", "right"),
        ("spaces_between_special_tokens", False),
        ("repetition_detection", {"min_count": 2}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: LiveServer, field: str, value: Any) -> None:
    assert field in refused(server.chat("x", **{field: value}), field)


def test_fields_that_ask_for_nothing_pass(server: LiveServer) -> None:
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "modalities": ["text"],
        "suffix": None,
        "audio": None,
        "store": False,
    }
    response = server.chat("SAY:x", max_tokens=4, **nothing)
    assert response.status_code == 200


@pytest.mark.parametrize("role", ["tool", "function"])
def test_tool_turns_are_refused(server: LiveServer, role: str) -> None:
    body = {"messages": [{"role": role, "content": "x"}]}
    refused(server.client.post(CHAT, json=body), "messages[0].role")


def test_unknown_models(server: LiveServer) -> None:
    response = server.chat("x", model="nope")
    refused(response, "model", 404, "model_not_found")
    assert server.client.get("/v1/models/nope").status_code == 404
    assert server.client.get(f"/v1/models/{server.model.name}").json()["id"] == server.model.name


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (chat_create_params.CompletionCreateParamsBase, ChatCompletionRequest),
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    ],
)
def test_every_field_of_openai_is_honoured_or_refused_by_name(theirs: type, ours: type[GenerationRequest]) -> None:
    left = set(theirs.__annotations__) - set(ours.model_fields) - set(ours.unsupported)
    assert left == SAY_NOTHING & set(theirs.__annotations__)


@pytest.mark.parametrize("request_type", [ChatCompletionRequest, CompletionRequest])
def test_the_readme_lists_every_field(request_type: type[GenerationRequest]) -> None:
    listed = re.findall(r"`([a-z_*]+)`", README.split("\n## The API")[1].split("\n## ")[0])
    for field in (*request_type.model_fields, *request_type.unsupported):
        assert any(fnmatch(field, pattern) for pattern in listed), field
