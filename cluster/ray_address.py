"""Joining a Ray cluster that somebody else has started. Ray itself is imported only then: it reads its environment."""

from __future__ import annotations

import logging
import socket

NAMESPACE = "orcaserve"  # of our named actors
_CONNECT_S = 5.0


class NoRay(Exception):
    """Nobody answers there; one line for the operator."""


def join_ray(address: str) -> None:
    """`ray.init` on the cluster at `address` (host:port, or auto: the one on this machine). Raises NoRay.

    Ray itself goes on trying for minutes, while a preStop hook or an operator waits.
    """
    import ray
    from ray._private import services

    try:
        found = services.canonicalize_bootstrap_address(address)
        if found is None:
            raise NoRay("no Ray runs on this machine")
        host, port = services.extract_ip_port(found)
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        ray.init(address=found, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise NoRay(f"no Ray at {address}: {' '.join(str(error).split())}") from None
