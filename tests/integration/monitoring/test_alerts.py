"""promtool runs the rules over jobs of some hours, all in one Prometheus: each alert fires for its own, and for no
healthy one.
"""

import re
import shutil
import subprocess
from pathlib import Path

import yaml

from cormorant_testing.needs import lacks

RULES = Path(__file__).resolve().parents[3] / "charts" / "cormorant" / "files" / "rules" / "cormorant.yaml"
MINUTES = 300
ALERTS = [
    rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"] if "alert" in rule
]
STATES = ("starting", "running", "paused", "draining", "completing", "completed", "failed")
World = dict[str, str]
"""Values by series, as promtool writes them; one a minute."""


def series(name: str, **labels: str) -> str:
    labels = {"namespace": "team-a", "collectorjob": "pong"} | labels
    text = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"cormorant_{name}{{{text}}}"


def always(value: float) -> str:
    return f"{value}x{MINUTES}"


def grows(per_minute: float) -> str:
    return f"0+{per_minute}x{MINUTES}"


STEPPED = series("stepped_frames_total", group="cpu")
STOPS = f"0+60000x60 3600000x{MINUTES - 60}"


def state(now: str) -> World:
    return {series("head_state", state=known): always(int(known == now)) for known in STATES}


def phase(now: str) -> World:
    place = 'namespace="ops",job_namespace="team-a",collectorjob="pong"'
    return {f'cormorant_operator_job_phase{{{place},phase="{now}"}}': always(1)}


def healthy() -> World:
    """A job that collects, with a learner that publishes every minute."""
    return {
        **state("running"),
        STEPPED: grows(60000),
        series("frames_total", env="Pong-v5"): grows(60000),
        series("workers", group="cpu", state="desired"): always(4),
        series("workers", group="cpu", state="ready"): always(4),
        series("worker_restarts_total", group="cpu", reason="crash"): always(1),
        series("frames_dropped_total", reason="crash"): always(2048),
        series("weight_last_applied_timestamp_seconds"): grows(60),
        series("consumers"): always(1),
        series("weight_update_in_progress"): always(1),
        series("policy_version_published"): grows(1),
        series("weight_updates_total", result="applied"): grows(1),
        series("weight_updates_total", result="failed"): always(0),
        series("weight_updates_total", result="rejected"): always(1),
        series("queue_wait_seconds_total", side="producer"): grows(10),
        series("queue_wait_seconds_total", side="consumer"): grows(10),
        series("paused"): always(0),
        series("batch_staleness_versions_bucket", le="2"): grows(100),
        series("batch_staleness_versions_bucket", le="+Inf"): grows(100),
        series("sink_lag_frames"): always(4096),
        'cormorant_operator_reconcile_errors_total{namespace="ops",handler="reconcile"}': always(2),
        'cormorant_operator_leader{namespace="ops",pod="a"}': always(1),
        'cormorant_operator_leader{namespace="ops",pod="b"}': always(0),
        **phase("Running"),
    }


def standing(now: str) -> World:
    """A job whose workers do nothing, because of the state that it is in."""
    return {
        **healthy(),
        **state(now),
        STEPPED: STOPS,
        series("weight_last_applied_timestamp_seconds"): always(0),
        series("policy_version_published"): always(7),
    }


QUIET: dict[str, World] = {
    "healthy": healthy(),
    "starting": {**standing("starting"), series("workers", group="cpu", state="ready"): always(0)},
    "paused for an hour": {
        **standing("paused"),
        series("paused"): "0x240 1x60",
        series("queue_wait_seconds_total", side="consumer"): grows(60),
    },
    "waits for a consumer that is away": {
        **standing("running"),
        series("consumers"): always(0),
        series("weight_update_in_progress"): always(0),
        series("queue_wait_seconds_total", side="producer"): f"0+10x60 600+45x{MINUTES - 60}",
    },
    "finished": {**standing("completed"), series("workers", group="cpu", state="ready"): always(0)},
    "suspended: nothing of the job is scraped any more": {
        name: values if "operator" in name else "0+60000x30 _x270" for name, values in healthy().items()
    },
    "just resumed": {
        **healthy(),
        **{
            series("head_state", state=s): ("1x279 0x21" if s == "paused" else "0x279 1x21")
            for s in ("paused", "running")
        },
        STEPPED: "0x279 0+60000x21",
    },
}
FIRES: dict[str, World] = {
    "CormorantStalled": {STEPPED: STOPS},
    "CormorantFpsDropped": {STEPPED: "0+60000x275 16500000+12000x25"},
    "CormorantHeadFailed": {**state("failed")},
    "CormorantWorkersMissing": {series("workers", group="cpu", state="ready"): always(3)},
    "CormorantWorkerRestartLoop": {series("worker_restarts_total", group="cpu", reason="crash"): grows(0.5)},
    "CormorantFramesLost": {series("frames_dropped_total", reason="crash"): grows(6000)},
    "CormorantStaleWeights": {series("weight_last_applied_timestamp_seconds"): always(0)},
    "CormorantHighStaleness": {series("batch_staleness_versions_bucket", le="2"): grows(10),
                               series("batch_staleness_versions_bucket", le="8"): grows(20),
                               series("batch_staleness_versions_bucket", le="16"): grows(100)},
    "CormorantUpdateHung": {series("policy_version_published"): always(7)},
    "CormorantUpdatesFailing": {series("weight_updates_total", result="rejected"): grows(1)},
    "CormorantQueueFull": {series("queue_wait_seconds_total", side="producer"): grows(58)},
    "CormorantQueueStarved": {series("queue_wait_seconds_total", side="consumer"): grows(58)},
    "CormorantPausedTooLong": {**state("paused"), series("paused"): always(1)},
    "CormorantSinkLagging": {series("sink_lag_frames"): always(900000)},
    "CormorantReconcileErrors": {
        'cormorant_operator_reconcile_errors_total{namespace="ops",handler="reconcile"}': grows(30)
    },
    "CormorantNoLeader": {'cormorant_operator_leader{namespace="ops",pod="a"}': always(0)},
    "CormorantHeadsSilent": {
        'cormorant_operator_heads{namespace="ops",state="silent"}': always(30),
        'cormorant_operator_heads{namespace="ops",state="answering"}': always(20),
    },
    "CormorantJobFailed": phase("Failed"),
}  # fmt: skip


def run_promtool(folder: Path, world: World, *, alerts: list[str]) -> str:
    """What promtool says of these alerts in a world. None is expected: it complains of each that fires."""
    if shutil.which("promtool") is None:
        lacks(
            "prometheus", "no promtool on the PATH: the alerts are not evaluated (Debian: apt-get install prometheus)"
        )
    case = {
        "interval": "1m",
        "input_series": [{"series": key, "values": value} for key, value in world.items()],
        "alert_rule_test": [{"eval_time": f"{MINUTES - 2}m", "alertname": alert, "exp_alerts": []} for alert in alerts],
    }
    path = folder / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=100)
    return done.stdout + done.stderr


def test_each_alert_fires_in_its_world_and_in_no_healthy_one(tmp_path: Path) -> None:
    # One Prometheus for all: each has a job and an operator of its name.
    world: World = {}
    for name, one in ({alert: healthy() | fires for alert, fires in FIRES.items()} | QUIET).items():
        mine = (('collectorjob="pong"', f'collectorjob="{name}"'), ('namespace="ops"', f'namespace="{name}"'))
        world |= {key.replace(*mine[0]).replace(*mine[1]): values for key, values in one.items()}
    said = run_promtool(tmp_path, world, alerts=ALERTS)
    fired = set()
    for line in re.findall(r"Labels:\{(.*)\}", said):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
        fired.add((labels["alertname"], labels.get("collectorjob", labels.get("namespace"))))
    assert {(alert, alert) for alert in ALERTS} - fired == set(), said
    assert [(alert, name) for alert, name in fired if name in QUIET] == []


def test_no_leader_fires_when_no_operator_is_left(tmp_path: Path) -> None:
    without = {name: values for name, values in healthy().items() if "cormorant_operator" not in name}
    assert 'alertname="CormorantNoLeader"' in run_promtool(tmp_path, without, alerts=["CormorantNoLeader"])
