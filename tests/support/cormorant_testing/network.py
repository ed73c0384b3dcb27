"""Networks that fail: what one pod sends to another is dropped, as an egress policy does, or what two threads send."""

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000


@contextmanager
def cut_off(pod_ip: str, other_ip: str) -> Iterator[None]:
    """Drop what a pod sends to another. Skips where the pod's network is not one of this machine's."""
    name = _network_of(pod_ip)
    rule = ["OUTPUT", "--destination", other_ip, "--jump", "DROP"]
    inside = ["ip", "netns", "exec", name, "iptables"]
    _run([*inside, "--insert", *rule])
    try:
        yield
    finally:
        _run([*inside, "--delete", *rule])


def in_own_network(body: Callable[[], None]) -> None:
    """Call a function in a thread that has a network of its own, with a loopback interface alone; so have the threads
    and commands that it starts. Skips where that is not allowed.
    """
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
                pytest.skip(f"no network of its own: {os.strerror(ctypes.get_errno())}")
            _run(["ip", "link", "set", "lo", "up"])
            body()
        except BaseException as error:  # noqa: BLE001  # raised by the caller's thread
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if outcome:
        raise outcome[0]


def drop_everything() -> None:
    """Lose every packet in this thread's network, without a word to either end. Never on the machine's own network:
    see `in_own_network`.
    """
    mine, machines = (Path(f"/proc/{of}/ns/net").readlink() for of in ("thread-self", "self"))
    assert mine != machines
    _run(["iptables", "--policy", "INPUT", "DROP"])


def _network_of(pod_ip: str) -> str:
    names = [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line]
    for name in names:
        if f" {pod_ip}/" in _run(["ip", "-netns", name, "-oneline", "address"]):
            return name
    pytest.skip(f"no network of this machine has the address {pod_ip}: the pod cannot be cut off from here")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"{error}: a pod cannot be cut off from here")
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout
