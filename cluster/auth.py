"""API keys: who is calling. Keys are hashed when they are read (a configuration may hold `sha256:HEX` in their place),
compared in constant time, and never logged."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orcaserve.cluster.app_config import ApiKeys, hashed_key
from orcaserve.cluster.errors import Unauthorized

_OWN_PAGES = (b"", b"none", b"same-origin")
OPEN_PATHS = frozenset({"/health", "/ready"})  # all else wants a key, where keys are configured


class Tenant(BaseModel):
    """Who a key belongs to, and what it may use. Zero is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    weight: float = Field(default=1.0, gt=0)  # share of the machine under the fair policy
    max_concurrency: int = Field(default=0, ge=0)  # requests at a time, in one router
    max_tokens_per_minute: int = Field(default=0, ge=0)  # prompt and generated tokens, in one router


class TenantEntry(Tenant):
    """One entry of the tenants file: a tenant and its keys (several, so that they can be rotated)."""

    name: str = Field(min_length=1)
    keys: ApiKeys = Field(min_length=1, repr=False)


class TenantsFile(BaseModel):
    """YAML: `tenants: [{name, keys: [...], weight, max_concurrency, max_tokens_per_minute}, ...]`."""

    model_config = ConfigDict(extra="forbid")

    tenants: list[TenantEntry]


class KeyRing:
    """The configured keys, as salted hashes. With none configured every caller is the same nameless tenant."""

    def __init__(self, keys: Iterable[str] = (), tenants: Iterable[TenantEntry] = ()) -> None:
        self._salt = secrets.token_bytes(32)
        self._tenants: list[tuple[bytes, Tenant]] = []
        for key in keys:
            self._add(key, Tenant(name="default"))
        for entry in tenants:
            tenant = Tenant(**entry.model_dump(exclude={"keys"}))
            for key in entry.keys:
                self._add(key, tenant)

    def _add(self, key: str, tenant: Tenant) -> None:
        digest = self._digest(bytes.fromhex(hashed_key(key).removeprefix("sha256:")))
        if any(known == digest for known, _ in self._tenants):
            raise ValueError(f"an API key is configured twice (the second time for tenant '{tenant.name}')")
        self._tenants.append((digest, tenant))

    def _digest(self, key_hash: bytes) -> bytes:
        return hmac.digest(self._salt, key_hash, hashlib.sha256)

    def tenant_of(self, authorization: list[bytes], fetch_site: bytes = b"") -> Tenant:
        """The tenant behind a request's `Authorization` headers. Raises Unauthorized.

        A browser sends HTTP Basic (the key is the password) by itself once it was typed in, also for a foreign page:
        it counts only where the browser's own `Sec-Fetch-Site` says that no foreign page is behind the request.
        Every configured key is compared with, whatever the first ones say.
        """
        if not self._tenants:
            return Tenant()
        scheme, _, key = authorization[0].partition(b" ") if len(authorization) == 1 else (b"", b"", b"")
        if scheme.lower() == b"basic" and fetch_site in _OWN_PAGES:
            scheme, key = b"bearer", _password(key)
        if scheme.lower() != b"bearer" or not key.strip():
            raise Unauthorized("This server wants one header 'Authorization: Bearer KEY'.")
        digest = self._digest(hashlib.sha256(key.strip()).digest())
        found: Tenant | None = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Unauthorized("The API key is not known here.")
        return found


def read_keys(file: Path) -> list[str]:
    """One key a line, as a Secret is mounted. Raises ValueError that names the file, but no key."""
    keys = _text(file).split()
    if not keys:
        raise ValueError(f"{file}: there is no key in it")
    return [hashed_key(key) for key in keys]


def _text(file: Path) -> str:
    """Raises ValueError that names the file, but nothing in it."""
    try:
        return file.read_text()
    except UnicodeDecodeError:
        raise ValueError(f"{file}: not a text in UTF-8") from None
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None


def _password(credentials: bytes) -> bytes:
    """What stands behind the colon of HTTP Basic's credentials; nothing where they are none."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def read_tenants(path: Path) -> list[TenantEntry]:
    """The tenants file. Raises ValueError that names the file and the place, but no key."""
    try:
        parsed = TenantsFile.model_validate(yaml.safe_load(_text(path)))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f"{path}: not valid YAML (line {mark.line + 1 if mark else '?'})") from None
    return parsed.tenants
