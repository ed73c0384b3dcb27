"""A network that fails: what one pod sends to another is dropped, as an egress policy does."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


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
