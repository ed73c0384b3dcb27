"""`cormorant top` before a real API server: one list of what a real operator wrote, and heads out of reach."""

import json
from typing import Any

import pytest

NAMESPACE = "top"
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CORMORANT_URL", "CORMORANT_TOKEN", "CORMORANT_TOKEN_FILE"):
        monkeypatch.delenv(variable, raising=False)


def reported(cli: Any) -> dict[str, Any]:
    (found,) = json.loads(cli.good("top", "--json"))["jobs"]
    return dict(found)


def test_jobs_are_listed_with_the_age_of_their_status(running) -> None:
    running.head.frames = 1234
    running.namespace.until(lambda: "1,234 (1%)" in running.good("top"), what="frames are shown")
    heading, row = running.good("top").splitlines()
    assert heading.split() == ["JOB", "PHASE", "FRAMES/S", "FRAMES", "WORKERS", "VERSION", "BEHIND", "AS", "OF", "NOTE"]
    assert row.split()[:8] == ["pong", "Running", "10", "1,234", "(1%)", "2/2", "0", "0"]
    running.namespace.until(lambda: reported(running)["reported_age_s"] > 4, what="nothing is new, and so it ages")
    running.good("pause", "pong", "--wait", "0")
    running.namespace.until(lambda: reported(running)["reported"]["phase"] == "Paused", what="the pause is written")
    assert reported(running)["reported_age_s"] < 4, "what changed is young again"


def test_job_that_no_operator_saw_is_a_line_beside_others(running) -> None:
    running.namespace("create", "-f", running.write("late", metadata={"labels": {"a": "b"}}))
    running.namespace.until(lambda: "2 jobs" in running.good("top"), what="both are there")
    assert running.good("top", "pong").splitlines()[1].startswith("pong  Running")


def test_unreachable_head_is_a_note_beside_the_status(running) -> None:
    # The head is a stub beside the API server: no kubelet leads there.
    for arguments in (["pong"], ["--workers"]):
        _, row = running.good("top", *arguments).splitlines()
        assert row.startswith("pong  Running")
        assert "does not answer through the API server" in row


def test_top_needs_only_the_right_to_list(running) -> None:
    running.become_viewer()
    assert "pong  Running" in running.good("top")
    assert 'cannot get resource "secrets"' in running.good("top", "pong")
    everywhere = running("top", namespace="default")
    assert (everywhere.code, 'cannot list resource "collectorjobs"' in everywhere.err) == (1, True)


def test_what_is_not_there_is_a_sentence(cli) -> None:
    name = cli.namespace.name
    done = cli("top")
    assert (done.code, done.out) == (0, "")
    assert done.err == f"there are no jobs in namespace {name}; -A shows those of all namespaces\n"
    assert f'namespace "{name[:-1]}" not found; did you mean' in cli("top", namespace=name[:-1]).err
    cli.good("submit", cli.write())
    done = cli("top", "pnog")
    assert (done.code, "did you mean pong?" in done.err) == (1, True)
    assert f"not reconciled by any operator; see `cormorant doctor pong -n {name}`" in cli.good("top")


def test_hundreds_of_jobs_are_one_list(cli) -> None:
    cli.good("submit", cli.write())
    pong = cli.namespace.get("cjob", "pong")
    jobs = [{**pong, "metadata": {"name": f"job-{number:03}"}, "status": {}} for number in range(200)]
    cli.namespace("create", "-f", "-", document={"apiVersion": "v1", "kind": "List", "items": jobs})
    lines = cli.good("top").splitlines()
    assert len(lines) == 1 + 201 + 1
    assert lines[-1].split()[:2] == ["201", "jobs"]
