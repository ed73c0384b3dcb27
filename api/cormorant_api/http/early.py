"""Opens ports before the head imports its web server: a kubelet's first probe waits for its answer instead of being
refused. Imports little.
"""

import socket

from cormorant_api.errors import HeadFault

_BACKLOG = 1024
_early: dict[tuple[str, int], socket.socket] = {}


def listen_early(host: str, port: int) -> None:
    """Accept connections on a port; `bound` returns its socket later."""
    _early[host, port] = bound(host, port)
    _early[host, port].listen(_BACKLOG)


def bound(host: str, port: int) -> socket.socket:
    """A socket on this port; 0: any free one. HeadFault if it is not available."""
    if (early := _early.pop((host, port), None)) is not None:
        return early
    found = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError as error:
        if found is not None:
            found.close()
        raise HeadFault(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --port (batches and "
            "weights use the one after it)"
        ) from error
    return found
