"""What a worker's pod tells of the actor in it."""

import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from cormorant_contract.metrics import METRICS
from cormorant_worker.collect.timing import IDLE, Timing
from cormorant_worker.supervisor.probes import PodMetrics, PodState
from cormorant_worker.worker.heartbeat import Heartbeat


def of_pod(folder: Path) -> PodMetrics:
    return PodMetrics(PodState(is_joined=True, joins=2), job="pong", group="cpu", heartbeat_file=folder / "pulse")


def value(pod: PodMetrics, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(pod.text()[0].decode()):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"no {name} {labels}")


def test_the_contracts_metrics_are_exported(tmp_path: Path) -> None:
    families = text_string_to_metric_families(of_pod(tmp_path).text()[0].decode())
    exported = {sample.name for family in families for sample in family.samples}
    assert exported == {metric.name for metric in METRICS["worker"] if not metric.when}


def test_frames_and_time_of_actors_add_up_over_their_deaths(tmp_path: Path) -> None:
    pod = of_pod(tmp_path)
    assert value(pod, "cormorant_worker_frames_total") == 0
    for frames in (100, 30):
        pulse = Heartbeat.create(tmp_path / "pulse")
        timing = Timing(pulse.timing)
        timing.rest(IDLE)
        pulse.frames[0] = frames
        assert value(pod, "cormorant_worker_frames_total") >= frames
        time.sleep(0.02)
    assert value(pod, "cormorant_worker_frames_total") == 130
    idle = value(pod, "cormorant_worker_phase_seconds_total", phase="idle")
    assert 0.02 <= idle < 5
    time.sleep(0.02)
    assert value(pod, "cormorant_worker_phase_seconds_total", phase="idle") >= idle + 0.02
