"""The cases of faults.jsonl about keys, limits, URLs and clients that leave, against live servers."""

from __future__ import annotations

import inspect
import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from orcaserve.cluster import auth
from orcaserve.cluster.app_config import AppConfig
from orcaserve.cluster.auth import KeyRing, Tenant, TenantEntry, read_tenants
from orcaserve.cluster.errors import RateLimited, Unauthorized
from orcaserve.cluster.limits import TenantGate
from tests.cluster.live import LiveServer
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
KEY = "sk-a-very-secret-key"


@pytest.fixture(scope="module")
def locked(make_server: Callable[..., LiveServer], tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    file = tmp_path_factory.mktemp("keys") / "tenants.yaml"
    file.write_text(
        """
        tenants:
          - {name: acme, keys: [acme-1, acme-2], weight: 3, max_concurrency: 2}
          - {name: tiny, keys: [tiny-1], max_tokens_per_minute: 60}
        """
    )
    return make_server(AppConfig(api_key=(KEY,), tenants_file=file, log_format="json"), parrot={"pace_s": 0.002})


def routes_of(server: LiveServer) -> list[str]:
    paths = server.surface.routes.openapi()["paths"]
    return ["/openapi.json", *(path.replace("{model_id}", "x") for path in paths)]


def test_case_35_every_route_wants_the_key(locked: LiveServer) -> None:
    paths = routes_of(locked)
    assert len(paths) >= 10
    odd = [
        "//v1/completions",
        "/V1/completions",
        "/v1/../v1/completions",
        "/v1/completions/",
        "/health/",
        "/health/../v1/models",
    ]
    odd += ["/%761/models", "/healthz", "/ready?x=1", "/docs", "/nope"]
    with SocketClient(locked) as send:
        for path in [*paths, *odd]:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"):
                for key in (None, "wrong"):
                    status, body = send(method, path, key)
                    if path.split("?")[0] in ("/health", "/ready"):
                        assert status in (200, 405), (method, path)
                    else:
                        assert status == 401, (method, path, status)
                        assert method == "HEAD" or json.loads(body)["error"]["code"] == "invalid_api_key"


class SocketClient:
    """Paths as they stand, which HTTP clients would tidy up."""

    def __init__(self, server: LiveServer) -> None:
        self._address = ("127.0.0.1", int(server.url.rpartition(":")[2]))

    def __enter__(self) -> Callable[[str, str, str | None], tuple[int, bytes]]:
        return self._send

    def __exit__(self, *_: object) -> None:
        pass

    def _send(self, method: str, path: str, key: str | None) -> tuple[int, bytes]:
        authorization = "" if key is None else f"Authorization: Bearer {key}\r\n"
        with socket.create_connection(self._address) as connection:
            head = (
                f"{method} {path} HTTP/1.1\r\nHost: x\r\n{authorization}Content-Length: 0\r\nConnection: close\r\n\r\n"
            )
            connection.sendall(head.encode())
            answer = b""
            while part := connection.recv(65536):
                answer += part
        head_bytes, _, body = answer.partition(b"\r\n\r\n")
        return int(head_bytes.split()[1]), body


def access_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "orcaserve.access"]


def test_case_35_the_right_key_opens_and_is_not_logged(locked: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        headers = {"authorization": f"Bearer {KEY}"}
        assert locked.client.get("/v1/models", headers=headers).status_code == 200
        assert locked.client.get("/v1/models", headers={"authorization": f"bearer {KEY}"}).status_code == 200
        assert locked.client.get("/v1/models", headers={"authorization": f"Bearer {KEY}x"}).status_code == 401
        body = {"prompt": "SAY:a private matter"}
        assert (
            locked.client.post(TEXT, json=body, headers=headers | {"x-request-id": "my-id.1"}).headers["x-request-id"]
            == "my-id.1"
        )
        eventually(lambda: len(access_lines(caplog)) == 4)  # a line is left after the last byte
    lines = access_lines(caplog)
    assert not any(KEY in record.getMessage() for record in caplog.records)
    line = json.loads(lines[-1])
    assert (line["request_id"], line["tenant"], line["status"]) == ("my-id.1", "default", 200)
    assert line["finish_reason"] == "stop"
    assert line["completion_tokens"] == 4
    assert "private" not in "".join(lines)


def test_request_ids_that_are_no_ids_are_replaced(server: LiveServer) -> None:
    for bad in ("a b", "x" * 200, "<script>"):
        got = server.client.get("/version", headers={"x-request-id": bad}).headers["x-request-id"]
        assert got != bad
        assert len(got) == 32


@pytest.mark.parametrize(
    "headers",
    [
        [(b"Authorization", "Bearer é".encode())],
        [(b"Authorization", b"Bearer \xff\xfe")],
        [(b"Authorization", b"Bearer")],
        [(b"Authorization", b"bearer K")],
        [(b"Authorization", KEY.encode())],
        [(b"Authorization", b"Basic " + KEY.encode())],
        [(b"Authorization", b"Bearer " + b"K" * 60_000)],
        [(b"Authorization", b"Bearer " + KEY.encode()), (b"Authorization", b"Bearer " + KEY.encode())],
        [(b"X-Api-Key", KEY.encode())],
    ],
)
def test_case_36_malformed_headers(locked: LiveServer, headers: list[tuple[bytes, bytes]]) -> None:
    response = locked.client.get("/v1/models", headers=headers)
    assert response.status_code in (400, 401)  # 400: longer than the HTTP parser reads
    assert response.status_code == 401 or len(headers[0][1]) > 50_000
    if response.status_code == 401:
        assert response.headers["www-authenticate"] == "Bearer"


def test_case_36_keys_are_hashed_and_compared_in_constant_time() -> None:
    ring = KeyRing([KEY, "other"], [TenantEntry(name="t", keys=["k1", "k2"])])
    assert ring.tenant_of([b"Bearer k2"]).name == "t"
    assert ring.tenant_of([b"Bearer " + KEY.encode()]).name == "default"
    assert KEY not in repr(vars(ring))
    assert "compare_digest" in inspect.getsource(KeyRing.tenant_of)
    source = inspect.getsource(auth)
    assert "== key" not in source
    with pytest.raises(Unauthorized):
        ring.tenant_of([b"Bearer k3"])
    hashed = AppConfig(api_key=(KEY,))
    assert KEY not in hashed.model_dump_json()
    assert KeyRing(hashed.api_key).tenant_of([b"Bearer " + KEY.encode()]).name == "default"
    with pytest.raises(Unauthorized):  # who steals the hash has no key
        KeyRing(hashed.api_key).tenant_of([b"Bearer " + hashed.api_key[0].encode()])
    with pytest.raises(ValidationError, match="64 hexadecimal"):
        AppConfig(api_key=("sha256:abc",))
    with pytest.raises(ValueError, match="twice"):
        KeyRing([KEY, KEY])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tenants: [{name: a}]", "keys"),
        ("tenants: [{name: a, keys: [s3cret], weight: 0}]", "weight"),
        ("tenants: [{name: a, keys: [s3cret], color: red}]", "color"),
        ("tenants: [", "YAML"),
        ("nothing: 1", "tenants"),
    ],
)
def test_tenants_files_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_tenants(file)
    assert "s3cret" not in str(error.value)


def test_a_tenant_has_so_many_requests_at_a_time(locked: LiveServer) -> None:
    headers = {"authorization": "Bearer acme-1"}
    body = {"prompt": "Count:", "stream": True, "max_tokens": 400, "ignore_eos": True}
    with (
        locked.client.stream("POST", TEXT, json=body, headers=headers) as one,
        locked.client.stream("POST", TEXT, json=body, headers=headers) as two,
    ):
        lines = one.iter_lines(), two.iter_lines()  # dropping such an iterator would close the connection
        assert all(next(each) for each in lines)
        locked.worker.gate.clear()
        refused = locked.client.post(TEXT, json={"prompt": "x"}, headers={"authorization": "Bearer acme-2"})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        locked.worker.gate.set()
        other = locked.client.post(TEXT, json={"prompt": "SAY:x"}, headers={"authorization": f"Bearer {KEY}"})
        assert other.status_code == 200
    locked.until_idle()
    eventually(lambda: locked.client.post(TEXT, json={"prompt": "SAY:x"}, headers=headers).status_code == 200)


def test_a_tenant_has_so_many_tokens_a_minute() -> None:
    now = [0.0]
    gate, tenant = TenantGate(lambda: now[0]), Tenant(name="t", max_tokens_per_minute=60)
    for _ in range(3):
        with gate.enter(tenant):
            gate.spend(tenant, 25)
    with pytest.raises(RateLimited) as refused, gate.enter(tenant):
        pass
    assert refused.value.retry_after_s == pytest.approx(16)
    now[0] += 17
    with gate.enter(tenant):
        pass


def test_a_tenant_over_its_tokens_is_told_when_to_come_back(locked: LiveServer) -> None:
    headers = {"authorization": "Bearer tiny-1"}
    first = locked.client.post(TEXT, json={"prompt": "Count:", "max_tokens": 100, "ignore_eos": True}, headers=headers)
    assert first.status_code == 200
    refused = locked.client.post(TEXT, json={"prompt": "x"}, headers=headers)
    assert refused.status_code == 429
    assert 30 <= int(refused.headers["retry-after"]) <= 60


def test_case_14_the_key_separates_the_cache(locked: LiveServer) -> None:
    def cached(key: str) -> int:
        body = {"prompt": "the same long prompt " * 20, "max_tokens": 1}
        usage = locked.client.post(TEXT, json=body, headers={"authorization": f"Bearer {key}"}).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEY) == 0
    assert cached("acme-1") == 0
    assert cached("acme-2") > 0  # another key of the same tenant


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:{port}/x", "http://169.254.169.254/latest", "file:///etc/passwd", "data:image/png;base64,AA"],
)
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_case_37_no_url_is_opened(server: LiveServer, url: str, kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        part = {"type": kind, kind: {"url": url.format(port=listener.getsockname()[1])}}
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}
        response = server.client.post(CHAT, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages[0].content[1]"
        with pytest.raises(TimeoutError):
            listener.accept()
