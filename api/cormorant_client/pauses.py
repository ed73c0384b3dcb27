"""Pause leases: renewed while held, and expired after their holder dies."""

import os
import socket
import threading
from contextlib import suppress

from cormorant_client.errors import ClientClosed, ClientError, NotFound
from cormorant_client.head import HeadConnection, quoted
from cormorant_contract.rest.control import PauseLease

_RENEWALS = 3
"""Renewals per lease time: two may fail."""


def default_owner() -> str:
    """Name of this process in the list of leases."""
    return f"{socket.gethostname()}-{os.getpid()}"


class Pause:
    """A pause lease of this client. As a context manager it is renewed until the block ends, then released.

        with client.pause(reason="evaluating"):
            evaluate()

    Without `with` it ends when it expires, or with `resume`.
    """

    def __init__(self, head: HeadConnection, *, owner: str, reason: str, ttl: float, wait: float) -> None:
        self._head = head
        self.owner = owner
        """Owner of the lease."""
        self._reason, self._ttl_s = reason, ttl
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.lease = self._ask(wait)
        """The lease as the head last reported it."""

    def renew(self) -> PauseLease:
        """Restart the lease's time limit from now."""
        self.lease = self._ask(0.0)
        return self.lease

    def resume(self) -> None:
        """Release the lease; the fleet continues when no other lease is left. May be called twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with suppress(NotFound):  # it had expired
            self._head.send("DELETE", f"/v1/pauses/{quoted(self.lease.id)}")

    def __enter__(self) -> "Pause":
        """Renew the lease until the block ends."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="cormorant-pause", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()

    def _keep(self) -> None:
        while not self._stop.wait(self._ttl_s / _RENEWALS):
            try:
                self.renew()
            except ClientClosed:
                return
            except ClientError:
                continue  # the next renewal may succeed; otherwise the lease expires

    def _ask(self, wait_s: float) -> PauseLease:
        request = {"owner": self.owner, "reason": self._reason, "ttl_seconds": self._ttl_s, "wait_seconds": wait_s}
        patience_s = None if self._thread is None else 0.0
        reply = self._head.post("/v1/pauses", request, wait_s=wait_s, patience_s=patience_s)
        return self._head.parse(PauseLease, reply)
