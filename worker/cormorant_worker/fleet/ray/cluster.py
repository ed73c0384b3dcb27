"""The Ray cluster of a fleet: started for it, connected to, or already connected."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray

from cormorant_worker.errors import FleetError, FleetInterrupted
from cormorant_worker.fleet.options import RayOptions

_CONNECT_S = 10.0
_ALARM_S = 0.5


_lock = threading.Lock()
"""Guards `_holders`, and connecting."""
_holders: "set[RayCluster]" = set()
"""Holders of the process's connection, where one of its fleets made it: the last of them ends it."""


class RayCluster:
    """This process's connection to Ray, which all its fleets share."""

    def __init__(self, options: RayOptions) -> None:
        """Connect, or start a cluster on this machine. Raises FleetError where it cannot be reached or started, and
        FleetInterrupted where SIGTERM comes meanwhile and the program's own handler does not end it.
        """
        self.is_own = False
        """The cluster is that of this process's fleets, and ends with the last of them."""
        self.has_connected = False
        """This object connected the process, with the options' runtime environment for all its workers."""
        if options.address and options.address != "auto":
            host, _, port = options.address.rpartition(":")
            try:  # Ray itself tries for minutes
                socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
            except (OSError, ValueError) as error:
                raise FleetError(
                    f'nothing answers at the Ray address "{options.address}" ({error}); give "auto", or host:port of a '
                    "head that `ray start --head` started, or leave the address out for a cluster of this machine"
                ) from error
        with _lock:
            if not ray.is_initialized():
                _holders.clear()  # an earlier one was ended from outside
                self._connect(options)
            if self.has_connected or _holders:
                self.is_own = self.is_own or any(known.is_own for known in _holders)
                _holders.add(self)
        self.node_id: str = ray.get_runtime_context().get_node_id()
        """The node on which this process runs."""

    def _connect(self, options: RayOptions) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # The coming behavior, without the warning that announces it.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Ray prints reports of lost workers to this process's stdout, whatever `log_to_driver` says; the fleet logs
        # them itself.
        ray._private.worker._worker_logs_enabled = False
        ours: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if not options.address:
            # No CPUs: Ray starts no processes ahead of time, and workers ask for none.
            ours |= {"include_dashboard": False, "num_cpus": 0}
        connect = partial(
            ray.init,
            **{**ours, **options.init},
            address=options.address or "local",
            # Folders are sent along with the connection alone, not with an actor.
            runtime_env=dict(options.runtime_env) or None,
        )
        try:
            with signals_kept():
                connect()
        except SystemExit as ended:
            if ended.code != signal.SIGTERM:
                raise
            signal.raise_signal(signal.SIGTERM)  # Ray's handler had it; the program's decides
            raise FleetInterrupted("SIGTERM came while the process connected to Ray") from ended
        except Exception as error:  # Ray raises a bare Exception where its node does not start in time
            if not options.address:
                raise FleetError(f"cannot start a Ray cluster on this machine: {error}") from error
            raise FleetError(
                f'cannot connect to the Ray cluster "{options.address}": {error}; if it wants a token, set '
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the one that it was started with"
            ) from error
        self.is_own = not options.address
        self.has_connected = True

    def check(self) -> None:
        """Raise if this process is cut off from the cluster. Waits for Ray's head."""
        if not any(node["Alive"] and node["NodeID"] == self.node_id for node in ray.nodes()):
            raise FleetError(
                f"the Ray node {self.node_id} on which this process runs is gone (its raylet has ended), and with it "
                "every worker that belongs to this process; start Ray there again, then the job"
            )

    def store_bytes(self) -> int:
        return min(int(node["Resources"].get("object_store_memory", 0)) for node in ray.nodes() if node["Alive"])

    def close(self) -> None:
        """With the last fleet of this process, end its connection, and a cluster of its own. May be called twice."""
        with _lock:
            if self in _holders:
                _holders.discard(self)
                self.has_connected = False
                if not _holders:
                    ray.shutdown()


def disconnect() -> None:
    """End this process's connection to Ray, even the caller's own, and what it runs there. May be called twice."""
    ray.shutdown()


@contextmanager
def signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself as it connects; how this process ends is not its business.

    Its C++ part puts a handler of its own before Python's, takes the signal for a crash, calls Python's, and has the
    process aborted by an alarm three seconds later. It is taken back again and again: Python's handler runs only after
    the current call of Ray, which may wait longer for Ray's head.
    """
    handler = signal.getsignal(signal.SIGTERM)
    has_alarm = signal.getitimer(signal.ITIMER_REAL)[0] > 0  # it is the program's own
    connected = threading.Event()

    def take_back() -> None:
        while not (connected.wait(_ALARM_S) or has_alarm):
            signal.alarm(0)

    taking_back = threading.Thread(target=take_back, name="alarm", daemon=True)
    taking_back.start()
    try:
        yield
    finally:
        connected.set()
        taking_back.join()
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)
        if not has_alarm:
            signal.alarm(0)
