"""Creates the listening socket of the server."""

from __future__ import annotations

import math
import socket

_KEEPALIVE_PROBES = 4
STALL_TIMEOUT_S = 60.0


def listen(host: str, port: int, *, stall_timeout_s: float = STALL_TIMEOUT_S) -> socket.socket:
    """A listening socket. Listens at once, because two processes may bind the same port as long as none listens.

    Connections are closed after `stall_timeout_s` during which the peer acknowledges neither data nor the system's
    keepalive probes: a client that never reads would keep its answer in memory, a vanished one its request in the
    batch. The operating system enforces it (`TCP_USER_TIMEOUT` and keepalive, inherited by accepted connections; Linux
    only), since only it knows what the peer acknowledged.

    Raises:
      socket.gaierror: the host is unknown.
      OSError: the port is in use, or not allowed.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            probe_s = max(1, math.ceil(stall_timeout_s / _KEEPALIVE_PROBES))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(stall_timeout_s * 1e3))
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener
