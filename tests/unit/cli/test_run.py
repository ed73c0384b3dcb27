"""What `cormorant run` refuses before it imports the worker, and what a run looks like: rates, lines, JSON."""

import io
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from cormorant_cli import __main__ as entry
from cormorant_cli.commands.run import read_job
from cormorant_cli.progress import (
    Display,
    JsonDisplay,
    LiveDisplay,
    PlainDisplay,
    Rate,
    RunPlan,
    Summary,
    summary_lines,
)
from cormorant_testing.stats import make_stats
from cormorant_worker.fleet.slot import WorkerStats
from manifest_making import manifest

PLAN = RunPlan(
    job="pong", env="EnvPool Pong-v5, 64 per worker", workers=2, replicas=2, total_frames=200_000, dataset="data/pong"
)
WORKER = WorkerStats(name="cpu-0", phase="stepping", attempt=0, frames=20_000, version=3, pid=1, env_restarts=0)  # type: ignore[arg-type]  # a plain number


def show(display: Display, waits_for: str = "", **changed: Any) -> None:
    workers = (WORKER, replace(WORKER, name="cpu-1", phase="storing"))
    stats = {"frames": 50_000, "total_frames": 200_000, "version": 3, "queued_batches": 1, "workers": workers}
    display.progress(make_stats(**(stats | changed)), 8123.4, waits_for)


OURS = "/usr/lib/python3.11/site-packages/cormorant_worker"
OF_THE_USER = """Traceback (most recent call last):
  File "/home/me/policy.py", line 4, in act
    return network(observation)
  File "/usr/lib/python3.11/site-packages/torch/nn/linear.py", line 125, in forward
    return F.linear(input, self.weight)
RuntimeError: shapes do not fit"""
TRACEBACK = OF_THE_USER.replace(
    "last):\n", f'last):\n  File "{OURS}/policy/actor.py", line 9, in _try\n    self.call()\n'
)
TRACEBACK += f"""

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "{OURS}/worker/runtime.py", line 114, in run
cormorant_worker.errors.PolicyError: the policy raised RuntimeError"""
READY = {"event": "worker_ready", "level": "info", "worker": "cpu-0", "seconds": 4.2}
PLAYED: dict[str, Any] = {"episodes": 5, "recent": {("return", ""): (1.0, 2.0), ("length", ""): (20, 20)}}
STATS = make_stats(
    frames=200_000,
    total_frames=200_000,
    episodes=250,
    recent={("return", ""): (-20.5,), ("length", ""): (812, 812, 812, 813)},
).summary()
SUMMARY = Summary(reason="done", stats=STATS, new_frames=150_000, seconds=20.0, fps=7500.0, dataset="data/pong")


def test_rate_looks_at_the_last_seconds_only() -> None:
    rate = Rate()
    assert rate.observe(0, 0) == 0
    assert rate.observe(1, 100) == 100
    assert rate.observe(10, 1000) == 100
    assert rate.observe(20, 1000) == 0


def test_plain_line_has_all_that_matters(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay()
    display.begin(replace(PLAN, replicas=40))
    show(display)
    recent = PLAYED["recent"] | {("success", ""): (0.625,), ("lives", ""): (math.nan,)}
    show(display, **PLAYED | {"recent": recent}, dropped={"crash": 1200, "stale": 7}, restarts=1)
    dropped, workers = "dropped 1,200 (crash), 7 (stale)", "workers: cpu-0 stepping, cpu-1 storing"
    fewer = "2 of the manifest's 40 workers, one per core (--workers 40 starts all)"
    played = "5 episodes, return 1.50, length 20.0, success 0.625"
    amount = "50,000 of 200,000 frames (25%), 8,123 frames/s"
    assert capsys.readouterr().out.splitlines() == [
        f"pong: 200,000 frames of EnvPool Pong-v5, 64 per worker; {fewer} into data/pong",
        "starting 2 workers: importing PyTorch and the environments takes 5 to 30 s ...",
        f"{amount}, 0 episodes, policy version 3, {workers}",
        f"{amount}, {played}, policy version 3, {dropped}, {workers}, 1 restarted",
    ]


def test_waiting_for_a_learner_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay()
    no_consumer = "waiting for a learner: no consumer has asked for batches yet"
    later = [f"waiting for a learner: the last one asked for batches {s} s ago" for s in (9, 12)]
    for waits_for in (no_consumer, no_consumer, "", *later, no_consumer):
        show(display, waits_for)
    lines = capsys.readouterr().out.splitlines()
    amount = "(50,000 of 200,000 frames (25%))"
    assert lines.pop(1).startswith("50,000 of 200,000 frames (25%), 8,123 frames/s")
    assert lines == [f"{no_consumer} {amount}", f"{later[0]} {amount}", f"{no_consumer} {amount}"]


def test_warning_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay()
    for restarts in (10, 40, 120):
        show(display, env_failures=f"environments keep failing: {restarts} restarts\nTraceback")
    show(display, env_failures="environments keep failing: 10 restarts; another cause")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("50,000 of 200,000 frames"), "below its warning"
    assert [line for line in lines if line.startswith("warning: ")] == [
        "warning: environments keep failing: 10 restarts",
        "warning: environments keep failing: 10 restarts; another cause",
    ]


def test_link_with_the_token_is_for_people_alone(capsys: pytest.CaptureFixture[str]) -> None:
    JsonDisplay().serving("http://h:8000", page="http://h:8000/#token=secret", token_file="head/tokens.json")
    said = json.loads(capsys.readouterr().out)
    assert said == {"event": "serving", "url": "http://h:8000", "token_file": "head/tokens.json"}


@pytest.mark.parametrize("counts", ["frames", "episodes"])
def test_live_bar_keeps_the_log_above_it(counts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    display = LiveDisplay(Console(file=screen, force_terminal=True, width=120, highlight=False), shares_stderr=True)
    display.begin(replace(PLAN, counts=counts))
    show(display, **PLAYED)
    display.log({"event": "worker_lost", "level": "warning", "reason": "[red]killed[/red]"})
    display.end(SUMMARY)
    display.close()
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "")
    assert f"50,000 of 200,000 {counts} (25%) 8,123 frames/s -:--:--" in drawn
    assert "5 episodes · return 1.50 · length 20.0 · policy version 3" in drawn
    assert drawn.index("warning: worker lost: [red]killed[/red]") < drawn.rindex("workers: cpu-0 stepping")
    assert "\x1b[1;36m8,123 frames/s" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[?25h")  # the cursor is back
    assert capsys.readouterr().out.splitlines() == summary_lines(SUMMARY, counts)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (READY, "worker cpu-0 is ready after 4.2 s\n"),
        ({"event": "head_ready", "level": "info", "url": "x"}, ""),
        ({"event": "worker_lost", "level": "warning", "frames": 64}, "warning: worker lost (frames 64)\n"),
        ({"event": "bad", "level": "error", "exception": "Traceback"}, "error: bad\nTraceback\n"),
        ({"event": "worker_traceback", "level": "warning", "exception": TRACEBACK}, f"{OF_THE_USER}\n"),
        ({"event": "worker_traceback", "level": "warning", "exception": TRACEBACK.replace("/home/me", OURS)}, ""),
        ({"event": "restarted", "level": "warning", "exception": TRACEBACK}, f"warning: restarted\n{OF_THE_USER}\n"),
    ],
)
def test_log_is_sentences_each_once_and_raw_where_asked(
    event: dict[str, object], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    display = PlainDisplay()
    display.log(event)
    display.log({**event, "level": "warning"} if line.startswith("warning") else {})
    assert capsys.readouterr().err == line
    PlainDisplay(is_verbose=True).log(event)
    assert str(event["event"]) in capsys.readouterr().err


RATE, EPISODES = (
    ": 7,500 frames/s over 20.0 s with all workers",
    "250 episodes; mean return -20.50 and mean length 812.2",
)
KEPT, NEXT = "dataset: data/pong, 200,000 frames", "next: cormorant dataset verify data/pong"


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        (
            {"stats": replace(STATS, metric_means={"success": 0.625, "lives": None})},
            [f"collected 150,000 frames{RATE}", f"{EPISODES} over the last 100; success 0.625", KEPT, NEXT],
        ),
        (
            {"reason": "interrupted", "dataset": "", "stats": replace(STATS, dropped={"drain": 64})},
            [
                f"stopped after 150,000 frames{RATE}",
                f"{EPISODES} over the last 100",
                "dropped frames: 64 (drain)",
                "frames that no learner took were counted but not kept; add output.dataset to keep everything",
            ],
        ),
        (
            {"reason": "already_complete", "new_frames": 0},
            [
                "nothing to do: the dataset at data/pong already has 200,000 frames",
                "to collect more, raise totalFrames (now 200,000) or change output.dataset.uri",
            ],
        ),
    ],
    ids=["done", "interrupted", "already_complete"],
)
def test_summary(changed: dict[str, Any], lines: list[str]) -> None:
    assert summary_lines(replace(SUMMARY, **changed)) == lines


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_several_jobs_in_a_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all([manifest("one"), manifest("two")]))
    assert entry.run(["run", str(path)]) == 2
    said = capsys.readouterr()
    assert said.err == f"{path} contains 2 CollectorJobs; put each into a file of its own\n"
    assert said.out == ""


def test_modules_beside_a_manifest_from_stdin_are_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(yaml.safe_dump(manifest("one")).encode())))
    assert read_job("-").metadata.name == "one"
    assert str(tmp_path) in sys.path


def test_a_machine_reads_the_refusal_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "absent.yaml"
    assert entry.run(["run", str(missing), "--json"]) == 2
    message = f"{missing}: cannot be read: No such file or directory; check the path"
    said = capsys.readouterr()
    assert said.out == f'{{"event": "failed", "message": "{message}", "exit_code": 2}}\n'
    assert json.loads(said.err) == {"error": message, "exit_code": 2}
