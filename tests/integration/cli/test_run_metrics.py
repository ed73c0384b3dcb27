"""`cormorant run --metrics-port`: a fleet without a head tells Prometheus of itself."""

import contextlib
import socket
import time
import urllib.request

import pytest

from cormorant_contract.metrics import METRICS
from cormorant_testing.commands import START_S, Started, Written
from cormorant_testing.scripts import unused_port

pytestmark = pytest.mark.timeout(3 * START_S)
DECLARED = {sample for metric in METRICS["head"] for sample in metric.sample_names}


def frames_of(text: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith('cormorant_frames_total{collectorjob="small"')]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


def test_a_fleet_is_scraped_while_it_collects(start: Started, write: Written) -> None:
    write()
    port, text = unused_port(), ""
    running = start("run", "job.yaml", "--metrics-port", str(port))
    deadline = time.monotonic() + START_S
    while frames_of(text) == 0:
        assert time.monotonic() < deadline, text
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
            text = reply.read().decode()
        time.sleep(0.1)
    names = {line.partition("{")[0] for line in text.splitlines() if not line.startswith("#")}
    assert names <= DECLARED
    assert "cormorant_workers" in names
    running.interrupt()
    assert running.end()[0] == 130


@pytest.mark.slow
def test_a_port_that_is_taken_is_a_sentence(start: Started, write: Written) -> None:
    write()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = start("run", "job.yaml", "--metrics-port", str(port)).end()
    assert code == 2
    assert f"cannot listen on --metrics-port {port}" in err
    assert "Traceback" not in err
