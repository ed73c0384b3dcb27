"""What the client does when a head is away, refuses, or is somebody else: against a listener that does as told. The
client for asyncio: what is cancelled, and when.
"""

import asyncio
import gc
import inspect
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from cormorant_client import AsyncClient, connect, errors
from cormorant_client.aio import AsyncBatches
from cormorant_client.head import HeadConnection
from cormorant_client.transport import Transport, parse_address
from cormorant_testing.clock import Clock
from cormorant_testing.scripted_head import UPDATE, Heard, Say, ScriptedHead, in_turn, job_status, problem
from cormorant_testing.scripts import unused_port

pytestmark = pytest.mark.anyio
LEASE = {
    "id": "p1", "owner": "o", "reason": "", "state": "paused",
    "created_at": "2026-01-01T00:00:00Z", "expires_at": "2026-01-01T00:00:00Z",
}  # fmt: skip


def update(version: int, state: str = "staged") -> Say:
    return Say(202, json.dumps({**UPDATE, "version": version, "state": state}).encode())


def models(version: int) -> Say:
    return Say(body=json.dumps({"models": [], "version": version}).encode())


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (401, "unauthenticated", errors.Unauthenticated),
        (403, "forbidden", errors.Forbidden),
        (410, "version-expired", errors.NotFound),
        (410, "stream-ended", errors.StreamEnded),
        (409, "version-conflict", errors.VersionTaken),
        (409, "not-paused", errors.Conflict),
        (412, "precondition-failed", errors.Conflict),
        (422, "tensor-mismatch", errors.TensorMismatch),
        (422, "not-finite", errors.NotFinite),
        (422, "state-mismatch", errors.StateMismatch),
        (415, "unsafe-format", errors.Refused),
        (429, "busy", errors.NotNow),
        (503, "fleet-failed", errors.HeadFailed),
        (503, "store-failed", errors.HeadFailed),
    ],
)
def test_problems_become_typed_errors(status: int, kind: str, expected: type[errors.HeadError]) -> None:
    error = errors.error_for(status, problem(status, kind, detail="because").body, where="GET x")
    assert type(error) is expected
    assert (str(error), error.kind, error.status) == ("because", kind, status)


def test_an_answer_of_something_else_is_quoted() -> None:
    with (
        ScriptedHead(in_turn(Say(404, b"<html>nginx</html>"))) as head,
        connect(head.url) as client,
        pytest.raises(errors.NotFound, match="which is not the answer of a Cormorant head: <html>nginx</html>"),
    ):
        client.status()


def test_urls_are_read_or_refused() -> None:
    assert str(parse_address("http://[::1]:8000")) == "http://[::1]:8000"
    assert str(parse_address("https://h/team/v1/")) == "https://h:443/team"
    for url in ("", "foo", "ftp://x", "http://", "http://x:99999"):
        with pytest.raises(errors.BadAddress):
            connect(url)


@pytest.mark.parametrize("url", ["u:secret@x", "user@x", ":secret@x", "x/?token=secret", "x/#secret"])
def test_a_url_with_a_password_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(errors.BadAddress, match="has only scheme, host and port; pass the token as") as refused:
        parse_address(f"http://{url}")
    assert "secret" not in str(refused.value)


def test_a_rollback_is_not_repeated() -> None:
    with ScriptedHead(in_turn(Say(breaks=True), update(9))) as head, connect(head.url) as client:
        with pytest.raises(errors.HeadUnreachable):
            client.rollback(3)
        assert len(head.heard) == 1


def test_a_closed_connection_is_not_used_again() -> None:
    closing = Say(body=models(1).body, headers={"Connection": "close"})
    with ScriptedHead(in_turn(closing)) as head, connect(head.url, reconnect_s=0) as client:
        assert [client.models().version for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("kind", ["no-workers", "draining"])
def test_a_head_that_is_not_ready_or_drains_is_asked_again(kind: str) -> None:
    busy = problem(503, kind, detail="wait", retry_after_s=0.01)
    with ScriptedHead(in_turn(busy, busy, models(2))) as head, connect(head.url) as client:
        assert client.models().version == 2
    with ScriptedHead(in_turn(busy)) as head, connect(head.url, reconnect_s=1.0) as client:
        with pytest.raises(errors.NotNow, match="wait"):
            client.models()
        assert len(head.heard) > 1


def test_a_head_that_answered_once_is_waited_for_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inspect.signature(connect).parameters["reconnect_s"].default == 600
    monkeypatch.setattr("cormorant_client.head._STRANGER_S", 0.0)
    answers = in_turn(Say(breaks=True), models(1), Say(breaks=True), models(2))
    with ScriptedHead(answers) as head, connect(head.url) as client:
        with pytest.raises(errors.HeadUnreachable):
            client.models()
        assert [client.models().version for _ in range(2)] == [1, 2]


def said_by_the_client(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Threads that earlier tests of this process left may log, too."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("cormorant_client")]


def test_waiting_for_a_head_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    # With any jitter, one try falls between 0.5 and 3 s. Between 2 and 3 s there may be none.
    monkeypatch.setattr("cormorant_client.head._SILENT_S", 0.5)
    url = f"http://127.0.0.1:{unused_port()}"
    with (
        connect(url, reconnect_s=3) as client,
        pytest.raises(errors.HeadUnreachable, match=r"no head answers at .* for \d s"),
    ):
        client.status()
    (line,) = said_by_the_client(caplog)  # one, however often it is tried
    assert line.startswith(f"waiting for the head at {url}, ")
    assert " of at most 3 s (GET /v1/status: " in line


def test_only_time_without_the_head_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    event = b'id: %d\ndata: {"kind": "paused", "time": "2026-01-01T00:00:00Z", "reason": ""}\n\n'
    puts, streams = [Say(breaks=True), update(7)], [Say(body=event % number) for number in (1, 2)]
    clock = Clock()
    monkeypatch.setattr("cormorant_client.head.time", SimpleNamespace(monotonic=clock))

    def answer(heard: Heard) -> Say:
        if heard.method == "PUT":
            clock.now += 3  # `wait` allows it
            return puts.pop(0)
        if heard.path != "/v1/events":
            return models(6)
        clock.now += 0.03
        return streams.pop(0) if streams else Say(body=b": cormorant\n\n")  # each closes at once

    with ScriptedHead(answer) as head, connect(head.url, reconnect_s=0.1) as client:
        assert client.publish({"w": np.zeros(1)}, wait=5).version == 7
        events = client.events()
        assert next(events).id == "1"
        clock.now += 600  # nothing happens in the job
        assert next(events).id == "2"
        with pytest.raises(errors.HeadUnreachable, match=r"could not reconnect: the stream ended"):
            next(events)


def publishing(*answers: Say) -> Callable[[Heard], Say]:
    put = in_turn(*answers)
    return lambda heard: put(heard) if heard.method == "PUT" else models(6)


def test_a_publish_that_broke_is_repeated_under_the_same_version() -> None:
    weights = {"w": np.arange(5, dtype=np.float32)}
    with ScriptedHead(publishing(Say(breaks=True), Say(breaks=True), update(7))) as head, connect(head.url) as client:
        assert client.publish(weights).version == 7
        puts = [heard for heard in head.heard if heard.method == "PUT"]
        assert [heard.path for heard in puts] == ["/v1/models/policy/weights?version=7"] * 3
        assert puts[0].body == puts[1].body == puts[2].body
        np.testing.assert_array_equal(safetensors.numpy.load(puts[0].body)["w"], weights["w"])
        assert puts[1].headers["content-type"] == "application/vnd.safetensors"


def test_old_weights_are_not_resent_as_the_newest() -> None:
    taken = problem(409, "version-conflict", detail="taken", current_version=11)
    with ScriptedHead(publishing(Say(breaks=True), taken, update(12))) as head, connect(head.url) as client:
        with pytest.raises(errors.Conflict, match="whether version 7 acted is unknown"):
            client.publish({"w": np.zeros(1)})
        assert len([heard for heard in head.heard if heard.method == "PUT"]) == 2
        assert client.publish({"w": np.ones(1)}).version == 12
        assert head.heard[-1].path.endswith("version=12")


def test_weights_that_nobody_took_are_an_error() -> None:
    late = problem(504, "apply-timeout", detail="0 of 2 workers")
    with ScriptedHead(publishing(late)) as head, connect(head.url) as client:
        with pytest.raises(errors.UpdateFailed, match="0 of 2 workers"):
            client.publish({"w": np.zeros(1)}, wait=0.1)
        assert head.heard[-1].headers["prefer"] == "wait=0.1"


def test_an_answer_before_the_whole_body_was_read_is_heard() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"HTTP/1.1 401 no\r\nContent-Length: 0\r\n\r\n")
        theirs.shutdown(socket.SHUT_RD)  # sending breaks
        transport = Transport(timeout_s=20, dial=lambda *_: ours)
        assert transport.request(parse_address("http://h"), "PUT", "/", body=[b"weights"]).status == 401


def serving(**status: object):  # type: ignore[no-untyped-def]
    """Answers of a port with this status, and the weights of version 5."""
    weights = Say(body=safetensors.numpy.save({"w": np.ones(2)}), headers={"Cormorant-Policy-Version": "5"})
    told = Say(body=json.dumps(job_status(**status)).encode())
    return lambda heard: told if "status" in heard.path else weights


@pytest.mark.parametrize(("data_epoch", "is_up"), [("e", True), ("another", True), ("e", False)])
def test_bulk_goes_to_the_data_port_if_it_is_of_the_same_head(data_epoch: str, is_up: bool) -> None:
    with ScriptedHead(serving(epoch=data_epoch)) as bulk:
        port = bulk.server_port if is_up else unused_port()
        with ScriptedHead(serving(data_port=port)) as head, connect(head.url, reconnect_s=0) as client:
            assert [client.weights().version for _ in range(2)] == [5, 5]
    served = [heard.path for heard in bulk.heard if "weights" in heard.path]
    assert served == (["/v1/models/policy/weights"] * 2 if (data_epoch, is_up) == ("e", True) else [])


def holding(asked: threading.Semaphore, hold: threading.Event) -> Callable[[Heard], Say]:
    def answer(heard: Heard) -> Say:
        if heard.path.startswith("/v1/batches"):
            asked.release()
            hold.wait()
            return Say(204, b"")
        return Say(body=json.dumps(job_status()).encode())

    return answer


def test_an_iteration_is_ended_and_fails_with_its_client(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cormorant_client.head._SILENT_S", 0.0)
    asked, hold = threading.Semaphore(0), threading.Event()
    with ScriptedHead(holding(asked, hold)) as head, connect(head.url, timeout_s=600, reconnect_s=600) as client:
        batches = client.deliveries(consumer="c", memory="never")
        assert asked.acquire(timeout=60)
        for _ in range(2):  # while the head holds its answer back
            batches.close()
        assert next(batches, None) is None
        hold.set()
        batches = client.deliveries(prefetch=0)
        client.close()
        with pytest.raises(errors.ClientClosed):  # not as if the job had ended
            next(batches)
    assert said_by_the_client(caplog) == [], "the head was not away"


def test_a_tls_handshake_without_an_answer_ends_in_time() -> None:
    ours, theirs = socket.socketpair()  # as of a forwarded port: without a time limit of its own
    with (
        ours,
        theirs,
        connect("https://127.0.0.1:1", dial=lambda *_: ours.dup(), timeout_s=0.2, reconnect_s=0) as client,
        pytest.raises(errors.HeadUnreachable, match="no answer in time"),
    ):
        client.status()


def test_a_connection_that_is_read_to_its_end_after_the_close_is_closed() -> None:
    transport = Transport(timeout_s=5)
    with ScriptedHead(in_turn(Say())) as head, transport.open(parse_address(head.url), "GET", "/") as response:
        transport.close(socket.SHUT_WR)
        assert response.read() == b"{}"
    assert [connection for kept in transport._idle.values() for connection in kept] == []


def test_token_is_not_in_the_repr_of_a_connection() -> None:
    transport = Transport(token="secret", timeout_s=1)
    assert "secret" not in repr(HeadConnection(address=parse_address("http://h"), transport=transport, reconnect_s=5))


class Numbers:
    """Batches that come when they may; each is acknowledged by the call after it."""

    def __init__(self) -> None:
        self.acked: list[int] = []
        self.released: list[int] = []
        self.is_asked, self.may_come = threading.Event(), threading.Event()
        self._last = -1

    def next(self) -> int:
        if self._last >= 0:
            self.acked.append(self._last)
        self.is_asked.set()
        assert self.may_come.wait(20)
        self._last += 1
        return self._last

    def close(self) -> None:
        self.released.append(self._last)

    def __exit__(self, *_: object) -> None:
        self.acked.append(self._last)


async def cancelled(awaited: Any, is_asked: threading.Event | None = None) -> None:
    """Await something, and give up before it comes."""
    task: asyncio.Future[Any] = asyncio.ensure_future(awaited)
    await (asyncio.sleep(0) if is_asked is None else asyncio.to_thread(is_asked.wait, 20))
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_batch_whose_await_was_cancelled_comes_to_the_next() -> None:
    numbers = Numbers()
    batches = AsyncBatches(numbers, asyncio.to_thread)  # type: ignore[arg-type]  # what it calls
    await cancelled(anext(batches), numbers.is_asked)
    numbers.may_come.set()
    assert await anext(batches) == 0
    assert numbers.acked == [], "it was seen only now"
    assert await anext(batches) == 1
    assert numbers.acked == [0]


async def test_a_stream_whose_exit_was_cancelled_ends_all_the_same() -> None:
    numbers, may_start, loop = Numbers(), threading.Event(), asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(may_start.wait, 20)
        batches = AsyncBatches(numbers, partial(loop.run_in_executor, pool))  # type: ignore[arg-type]  # what it calls
        await cancelled(batches.__aexit__(None))
        may_start.set()
    assert len(numbers.acked) == 1


@pytest.mark.parametrize("call", ["publish", "restore"])
async def test_weights_whose_call_was_cancelled_do_not_act_after_a_later_publish(call: str) -> None:
    def answer(heard: Heard) -> Say:
        if heard.method == "PUT" and not is_asked.is_set():
            is_asked.set()
            assert may_answer.wait(20)
        if heard.path == "/v1/pauses":
            return Say(body=json.dumps(LEASE).encode())
        return update(7) if heard.method == "PUT" else models(6)

    is_asked, may_answer = threading.Event(), threading.Event()
    with ScriptedHead(answer) as head:
        async with AsyncClient(head.url) as client:
            first = {"w": np.zeros(1)}
            state = safetensors.numpy.save(first)
            earlier = client.publish(first) if call == "publish" else client.restore(state)
            await cancelled(earlier, is_asked)
            later = asyncio.ensure_future(client.publish({"w": np.ones(1)}))
            await asyncio.wait([later], timeout=0.2)
            may_answer.set()
            await later
    puts = [safetensors.numpy.load(heard.body)["w"][0] for heard in head.heard if heard.method == "PUT"]
    assert puts == [0, 1]


async def test_next_batch_that_waits_outlives_a_second_one() -> None:
    numbers = Numbers()
    async with AsyncClient("http://127.0.0.1:9", reconnect_s=0) as client:
        client._stream = AsyncBatches(numbers, client._call)  # type: ignore[arg-type]  # what it calls
        first = asyncio.ensure_future(client.next_batch())
        await asyncio.to_thread(numbers.is_asked.wait, 20)
        with pytest.raises(errors.ClientError, match="two tasks share one iterator"):
            await client.next_batch()
        assert numbers.released == []
        numbers.may_come.set()
        assert await first == 0


@pytest.mark.parametrize("is_async", [False, True])
async def test_next_batch_that_waits_goes_on_after_another_call_and_ends_with_the_client(is_async: bool) -> None:
    asked, hold = threading.Semaphore(0), threading.Event()

    with ScriptedHead(holding(asked, hold)) as head:
        client = connect(head.url, timeout_s=600, reconnect_s=600)
        both: Any = AsyncClient(client) if is_async else client
        waiting = asyncio.ensure_future(both.next_batch() if is_async else asyncio.to_thread(both.next_batch))
        assert await asyncio.to_thread(asked.acquire, timeout=20)
        await asyncio.to_thread(both.streaming_split, 1)
        assert await asyncio.to_thread(asked.acquire, timeout=20), "it asks again"
        await (both.close() if is_async else asyncio.to_thread(both.close))
        with pytest.raises(errors.FleetClosed):
            await waiting
        if is_async:
            with pytest.raises(errors.FleetClosed):
                await both.pause().__aenter__()
        hold.set()


async def test_calls_do_not_wait_for_tasks_that_wait_for_batches() -> None:
    numbers = Numbers()
    with ScriptedHead(in_turn(models(6))) as head:
        async with AsyncClient(head.url) as client:
            many = [AsyncBatches(numbers, client._call) for _ in range(50)]  # type: ignore[arg-type]  # what it calls
            waiting = [asyncio.ensure_future(anext(batches)) for batches in many]
            await asyncio.wait_for(client.models(), 20)
            numbers.may_come.set()
            await asyncio.gather(*waiting)


def test_batches_that_were_left_are_returned_by_another_thread() -> None:
    returned: Future[int] = Future()
    batches: Any = SimpleNamespace(close=lambda: returned.set_result(threading.get_ident()))
    AsyncBatches(batches, asyncio.to_thread)
    gc.collect()
    assert returned.result(20) != threading.get_ident()


async def test_a_batch_that_nobody_saw_is_released_at_the_end() -> None:
    numbers = Numbers()
    async with AsyncBatches(numbers, asyncio.to_thread) as batches:  # type: ignore[arg-type]  # what it calls
        await cancelled(anext(batches), numbers.is_asked)
        numbers.may_come.set()
    assert (numbers.acked, len(numbers.released)) == ([], 1)


@pytest.mark.parametrize("is_patient", [False, True])
async def test_a_block_awaits_acknowledgements_of_all_iterations_and_close_does_not(is_patient: bool) -> None:
    may_end, ended = threading.Event(), list[bool]()
    client = AsyncClient("http://127.0.0.1:9", reconnect_s=0)
    for seconds in (30, 0):
        batches: Any = SimpleNamespace(close=print, __exit__=lambda *_, s=seconds: ended.append(may_end.wait(s)))
        client._stream = AsyncBatches(batches, client._call)
        client.streaming_split(1)
    if is_patient:
        asyncio.get_running_loop().call_later(0.3, may_end.set)
    await (client.__aexit__(None) if is_patient else client.close())
    assert ended == [False, *[True] * is_patient]
    may_end.set()


async def test_a_pause_whose_entry_or_exit_was_cancelled_is_given_back() -> None:
    is_asked, may_come, resumed = threading.Event(), threading.Event(), threading.Semaphore(0)
    lease = SimpleNamespace(resume=resumed.release)
    lease.__enter__ = lambda: is_asked.set() or (may_come.wait(20) and lease)
    fake: Any = SimpleNamespace(pause=lambda **_: lease, close=print)
    async with AsyncClient("http://127.0.0.1:9", reconnect_s=0) as client:
        client._client, client._pool = fake, ThreadPoolExecutor(1)
        await cancelled(client.pause().__aenter__(), is_asked)
        assert not resumed.acquire(blocking=False), "the head has not granted it"
        may_come.set()
        assert await asyncio.to_thread(resumed.acquire, timeout=20)
        pause = client.pause()
        await pause.__aenter__()
        may_come.clear()
        client._pool.submit(may_come.wait, 20)  # resuming waits for the only thread
        await cancelled(pause.__aexit__(None, None, None))
        may_come.set()
        assert await asyncio.to_thread(resumed.acquire, timeout=20)
