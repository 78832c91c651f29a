"""How a server says no."""

from __future__ import annotations

import httpx

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}


def refused(response: httpx.Response, param: str | None, status: int = 400, code: str | None = None) -> str:
    """The message of an answer that must be an error naming this field."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    message: str = error["message"]
    return message
