"""The head under load, through the client that users have: batches and weights over loopback HTTP against bare streams
of the same bytes, how long a publish takes until it acts, what publishing costs the collectors, and what streaming
costs control requests.

The bare server is a uvicorn in a process of its own, as the head's listeners are: it streams one prepared buffer, and
reads a body into one; the client is the SDK's own transport for both.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

import numpy as np
import torch

from benchmarks.micro import heads, rows
from cormorant.policies import atari_cnn, mlp
from cormorant_client import Client
from cormorant_client.transport import Transport, parse_address

START_S = 120.0
PUBLISH_BYTES = 100_000_000
STEADY_BYTES = 25_000_000


def measure(*, quick: bool) -> Sequence[dict]:
    rounds = 3 if quick else 9
    with _bare_server() as bare:
        found = [*_batches(bare, rounds), *_publishing(bare, rounds)]
    return [*found, _acting(rounds), _rate_while_publishing(rounds), _status_while_streaming(rounds)]


# -- what is measured ------------------------------------------------------------------------------------------


def _batches(bare: str, rounds: int) -> list[dict]:
    """28 MB batches of Pong, random policy: the fleet is paused with a full queue, so that only the way is measured."""
    ahead = 6
    job = heads.make_job("Pong-v5", 64, 64 * 16, policy=None, queue=ahead)
    with heads.running(job, workers=2) as head:
        client = head.client
        ratios, rates = [], []
        for _ in range(rounds):
            heads.until(lambda: client.status().queue.waiting >= ahead - 1)
            with client.pause():
                size = _take(client)
                start = time.perf_counter()
                for _ in range(ahead - 3):
                    _take(client)
                seconds = (time.perf_counter() - start) / (ahead - 3)
                bare_s = median(_bare_get(bare, size) for _ in range(ahead - 3))
            ratios.append(bare_s / seconds)
            rates.append(size / seconds / 1e6)
    note = f"{size / 1e6:.0f} MB, with acks; {median(rates):,.0f} MB/s"
    return [rows.row("batches over HTTP, over a bare streamed GET", median(ratios), "x", bar=">= 0.5", note=note)]


def _publishing(bare: str, rounds: int) -> list[dict]:
    """100 MB to two workers: until the head has checked and handed it over, and until both act with it."""
    width = int((PUBLISH_BYTES / 4) ** 0.5)
    job = heads.make_job("CartPole-v1", 8, 8, policy="mlp", kwargs={"hidden": [width, width]}, queue=2)
    with heads.running(job, workers=2) as head, _consumer(head.client):
        client = head.client
        weights = _zeros(mlp(*client.spaces, hidden=[width, width]))
        size = sum(tensor.numel() * 4 for tensor in weights.values())
        staged, applied = [], []
        for _ in range(rounds):
            bare_s = _bare_put(bare, size)
            start = time.perf_counter()
            update = client.publish(weights)
            staged.append(bare_s / (time.perf_counter() - start))
            update.wait(60)
            applied.append(bare_s / (time.perf_counter() - start))
    note = f"{size / 1e6:.0f} MB"
    return [
        rows.row("publish to staged, over a bare streamed PUT", median(staged), "x", bar=">= 0.5", note=note),
        rows.row("publish to acting on 2 workers, over a bare PUT", median(applied), "x", note=note),
    ]


def _acting(rounds: int) -> dict:
    """The CNN's weights, four workers, in the middle of collecting."""
    job = heads.make_job("Pong-v5", 8, 8 * 8, policy="atari_cnn", queue=4)
    with heads.running(job, workers=4) as head, _consumer(head.client):
        client = head.client
        weights = _zeros(atari_cnn(*client.spaces))
        size = sum(tensor.numel() * 4 for tensor in weights.values())
        milliseconds = []
        for _ in range(3 * rounds):
            time.sleep(0.2)
            start = time.perf_counter()
            client.publish(weights, wait=30)
            milliseconds.append(1e3 * (time.perf_counter() - start))
        status = client.status()
        batch_ms = 1e3 * 64 * 4 / max(1.0, status.frames.per_second)
    note = f"{size / 1e6:.1f} MB; a batch of one worker takes about {batch_ms:.0f} ms"
    return rows.row("publish to acting on 4 workers", median(milliseconds), "ms", bar="< 40 + rest of batch", note=note)


def _rate_while_publishing(rounds: int) -> dict:
    """Frames a second while 25 MB are published every second, over those without, in turn."""
    width = int((STEADY_BYTES / 4) ** 0.5)
    job = heads.make_job("HalfCheetah-v4", 64, 64 * 16, policy="mlp", kwargs={"hidden": [width, width]}, queue=4)
    with heads.running(job, workers=2) as head, _consumer(head.client):
        client = head.client
        weights = _zeros(mlp(*client.spaces, hidden=[width, width]))
        ratios = []
        for _ in range(rounds):
            without = _rate(client, lambda: None)
            ratios.append(_rate(client, lambda: client.publish(weights)) / without)
    return rows.row("collecting while 25 MB are published a second", median(ratios), "x", bar=">= 0.95")


def _status_while_streaming(rounds: int) -> dict:
    """Status requests while a consumer reads Pong batches as fast as they come."""
    job = heads.make_job("Pong-v5", 64, 64 * 16, policy=None, queue=4)
    milliseconds = []
    with heads.running(job, workers=2) as head, _consumer(head.client):
        client = head.client
        for _ in range(40 * rounds):
            start = time.perf_counter()
            client.status()
            milliseconds.append(1e3 * (time.perf_counter() - start))
            time.sleep(0.02)
    note = f"p50 {median(milliseconds):.1f} ms, {len(milliseconds)} requests"
    return rows.row(
        "status while batches stream, p99", float(np.percentile(milliseconds, 99)), "ms", bar="< 50", note=note
    )


# -- who is spoken to ------------------------------------------------------------------------------------------


@contextmanager
def _bare_server() -> Iterator[str]:
    with ExitStack() as stack:
        yield heads.announced(heads.start(stack, ["-m", "benchmarks.micro.bare_server"]), "ready")


@contextmanager
def _consumer(client: Client) -> Iterator[None]:
    """A consumer reads batches, in a process of its own, so that the queue never fills."""
    code = (
        "import sys\nfrom cormorant_client import connect\n"
        "for batch in connect(sys.argv[1]).deliveries(memory='never'):\n    pass\n"
    )
    with ExitStack() as stack:
        heads.start(stack, ["-c", code, client.url])
        heads.until(lambda: client.status().frames.collected > 0)
        yield


# -- small parts -----------------------------------------------------------------------------------------------


def _take(client: Client) -> int:
    """Fetch a batch and acknowledge it, as the SDK's iterator does. Returns its bytes."""
    head = client._head
    params = {"consumer": "bench", "wait": 30}
    reply = head.send("GET", "/v1/batches/next", params=params, wait_s=30, is_bulk=True)
    head.post(f"/v1/batches/{reply.headers['cormorant-batch-id']}/ack")
    return len(reply.body)


def _bare_get(url: str, size: int) -> float:
    return _timed(url, "GET", f"/bytes/{size}", ())


def _bare_put(url: str, size: int) -> float:
    return _timed(url, "PUT", "/bytes", (memoryview(np.ones(size, np.uint8)),))


def _timed(url: str, method: str, path: str, body: Sequence[memoryview]) -> float:
    transport = Transport(timeout_s=60)
    address = parse_address(url)
    transport.request(address, "GET", "/bytes/1")  # the connection is there, as the head's is
    start = time.perf_counter()
    transport.request(address, method, path, body=body)
    seconds = time.perf_counter() - start
    transport.close()
    return seconds


def _zeros(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in policy.state_dict().items()}


def _rate(client: Client, each_second: Callable[[], object]) -> float:
    """Frames a second over four seconds."""
    before, start = client.status().frames.collected, time.perf_counter()
    for second in range(4):
        each_second()
        time.sleep(max(0.0, start + second + 1 - time.perf_counter()))
    return (client.status().frames.collected - before) / (time.perf_counter() - start)


if __name__ == "__main__":
    rows.main(measure)
