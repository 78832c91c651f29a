"""orcaserve: large language models on a Ray cluster. The public face is the client; the server is `orcaserve serve`.

The names are loaded when they are first used, so that the server's processes do not pay for the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from orcaserve.cluster.client import Client as Client
    from orcaserve.cluster.client_async import AsyncClient as AsyncClient

_LAZY = {"Client": "orcaserve.cluster.client", "AsyncClient": "orcaserve.cluster.client_async"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'orcaserve' has no attribute '{name}'")


__all__ = ["AsyncClient", "Client", "__version__"]
