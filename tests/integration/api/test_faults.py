"""What clients do wrong, by accident or on purpose, over a job whose every frame is known by heart: none is lost and
none comes twice after it was acknowledged, and no weights act that were not published whole.
"""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cormorant_client.delivery import decode
from cormorant_testing.collecting import make_checker, make_job
from cormorant_testing.serving import Api, Reply, Served, serve, weights_file

PATH = "/v1/models/policy/weights"
OPTIONS = {"lengths": (3, 8)}


class Account:
    """The one learner: takes and acknowledges batches, and checks each of them in the order of its number."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.checker = make_checker(2, action="box", acts_by_version=True, **OPTIONS)
        self._bodies: dict[int, bytes] = {}
        self.acked: set[str] = set()
        self._next = 0

    def take(self, wait: float = 30) -> Reply:
        """Take a batch and acknowledge it."""
        reply = self.served.data.get(f"/v1/batches/next?wait={wait}&consumer=learner")
        assert reply.status == 200, reply
        batch = reply.headers["cormorant-batch-id"]
        assert batch not in self.acked, f"{batch} comes again after it was acknowledged"
        assert self.served.data.post(f"/v1/batches/{batch}/ack").status == 204
        self.acked.add(batch)
        self._bodies[int(batch.rpartition("-")[2])] = reply.body
        while self._next in self._bodies:
            self.checker.take(decode(memoryview(self._bodies.pop(self._next))).tensordict())
            self._next += 1
        return reply

    def settle(self) -> None:
        """Take until new frames came and none is missing."""
        until = self.checker.batches + 6
        deadline = time.monotonic() + 60
        while self.checker.batches < until or self._bodies:
            assert time.monotonic() < deadline, f"batch {self._next} is lost; later ones came: {sorted(self._bodies)}"
            self.take()
        frames = self.served.reader.get("/v1/status").json["frames"]
        assert frames["dropped"] == {}
        assert frames["delivered"] == self.checker.frames

    @property
    def version(self) -> int:
        return int(self.served.reader.get("/v1/models").json["version"])


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    job = make_job(num_envs=2, policy="versioned", action="box", step_s=0.001, **OPTIONS)
    with serve(job, directory=tmp_path_factory.mktemp("head"), workers=2, ack_within_s=1.0) as served:
        yield Account(served)


def publish(api: Api, version: int) -> Reply:
    """Weights that act their version."""
    return api.put(f"{PATH}?version={version}", weights_file(version))


def send_a_part(api: Api, lines: list[str], body: bytes = b"") -> None:
    """Send the beginning of a request, then go away."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=30) as connection:
        head = [*lines, "Host: x", f"Authorization: Bearer {api.token}", "", ""]
        connection.sendall("\r\n".join(head).encode() + body)
        time.sleep(0.1)


def a_publish_that_is_cut_off(account: Account) -> None:
    before = account.version
    body = weights_file(before + 1)
    for size in (4, 100, len(body) - 1):
        lines = [f"PUT {PATH}?version={before + 1} HTTP/1.1", f"Content-Length: {len(body)}"]
        send_a_part(account.served.writer, lines, body[:size])
    assert account.version == before


def two_publishers_at_once(account: Account) -> None:
    before = account.version
    with ThreadPoolExecutor(2) as pool:
        twice = [before + 1 + number // 2 for number in range(20)]
        statuses = set(pool.map(lambda number: publish(account.served.writer, number).status, twice))
    assert statuses <= {200, 202, 409}
    assert account.version == before + 10


def requests_that_are_none(account: Account) -> None:
    for junk in (
        b"\x16\x03\x01" + bytes(200),
        b"GET / HTTP/9\r\n\r\n",
        b"POST /v1/pause HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", account.served.data.port), timeout=30) as connection:
            connection.sendall(junk)
            assert connection.recv(65536).startswith(b"HTTP/1.1 400")


def a_consumer_that_dies_with_a_batch(account: Account) -> None:
    assert account.served.data.get("/v1/batches/next?wait=30&consumer=dead").status == 200
    send_a_part(account.served.data, ["GET /v1/batches/next?wait=30&consumer=cut HTTP/1.1"])


def a_consumer_that_is_slow(account: Account) -> None:
    slow = account.served.data.get("/v1/batches/next?wait=30&consumer=slow").headers["cormorant-batch-id"]
    account.settle()  # others go on, and get its batch when its time is over
    assert slow in account.acked
    assert account.served.data.post(f"/v1/batches/{slow}/ack").status == 204, "late, and harmless"


def a_lease_whose_owner_died(account: Account) -> None:
    lease = account.served.writer.post("/v1/pauses", {"owner": "dead", "ttl_seconds": 0.3, "wait_seconds": 60})
    assert lease.status == 201


FAULTS = (
    a_publish_that_is_cut_off,
    two_publishers_at_once,
    requests_that_are_none,
    a_consumer_that_dies_with_a_batch,
    a_consumer_that_is_slow,
    a_lease_whose_owner_died,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_no_frame_is_lost_and_none_comes_twice_after(fault: Callable[[Account], None], account: Account) -> None:
    account.settle()
    fault(account)
    account.settle()
    version = account.version + 1
    assert publish(account.served.writer, version).status == 202
    while int(account.take().headers["cormorant-min-version"]) < version:
        pass  # bounded by the queue: batches of older weights come first


def test_with_drop_oldest_what_a_slow_consumer_misses_is_counted(tmp_path: Path) -> None:
    job = make_job(
        num_envs=2, step_s=0.001, collection={"totalFrames": 1000},
        queue={"capacityBatches": 2, "onFull": "drop_oldest"}, **OPTIONS,
    )  # fmt: skip
    checker = make_checker(2, versions=False, gaps=True, **OPTIONS)
    with serve(job, directory=tmp_path / "head", workers=2, linger_s=1.0) as served:
        while (reply := served.data.get("/v1/batches/next?wait=30")).status == 200:
            time.sleep(0.1)
            checker.take(decode(memoryview(reply.body)).tensordict())
            assert served.data.ack(reply).status == 204
        assert reply.kind == "stream-ended"
        frames = served.reader.get("/v1/status").json["frames"]
        assert served.writer.post("/v1/seed", {"seed": 1}).kind == "stream-ended"
    assert frames["dropped"].keys() == {"drop_oldest"}
    assert frames["delivered"] == checker.frames
    assert frames["delivered"] + frames["dropped"]["drop_oldest"] == frames["collected"] == frames["stepped"] == 1000
    assert frames["settled"] == 1000, "what was dropped as the oldest is not collected again"
