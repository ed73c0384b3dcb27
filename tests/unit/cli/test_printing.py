"""Objects as text, and pods as places."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from cormorant_cli.commands.logs import Selection
from cormorant_cli.jobs import age, read_pod
from cormorant_cli.printing import show_objects, show_table

NOW = datetime(2026, 1, 2, tzinfo=UTC)
JOB = {
    "apiVersion": "cormorant.dev/v1alpha1",
    "kind": "CollectorJob",
    "metadata": {"name": "pong", "namespace": "rl", "managedFields": [{"manager": "x"}]},
    "spec": {"replicas": 1},
}
TABLE = {
    "columnDefinitions": [{"name": "Name"}, {"name": "FPS"}, {"name": "EnvPool", "priority": 1}],
    "rows": [
        {"cells": ["pong", 12.5, "Pong-v5"], "object": {"metadata": {"namespace": "rl"}}},
        {"cells": ["breakout", None, ""], "object": {"metadata": {"namespace": "team-a"}}},
    ],
}


def make_pod(name: str, *, slot: str = "", epoch: int = 1, old_s: int = 0, phase: str = "Running") -> Any:
    group, _, index = slot.rpartition("-")
    labels = {"cormorant.dev/role": "worker", "cormorant.dev/group": group, "cormorant.dev/index": index}
    if not slot:
        labels = {"cormorant.dev/role": "head", "cormorant.dev/epoch": str(epoch)}
    born = (NOW - timedelta(seconds=old_s)).isoformat()
    return read_pod(
        {
            "metadata": {"name": name, "uid": name, "creationTimestamp": born, "labels": labels},
            "status": {"phase": phase},
        }
    )


PODS = sorted(
    [
        make_pod("head-1", epoch=1, old_s=100, phase="Failed"),
        make_pod("head-2", epoch=2),
        make_pod("cpu-10-a", slot="cpu-10"),
        make_pod("cpu-2-a", slot="cpu-2", old_s=50, phase="Failed"),
        make_pod("cpu-2-b", slot="cpu-2"),
    ],
    key=lambda pod: pod.order,
)


def test_table_has_the_servers_columns_and_wide_has_all() -> None:
    assert show_table(TABLE, is_wide=False, has_namespaces=False) == "NAME       FPS\npong       12.5\nbreakout   -"
    assert (
        show_table(TABLE, is_wide=True, has_namespaces=True).splitlines()[1] == "rl          pong       12.5   Pong-v5"
    )


def test_objects_are_printed_without_book_keeping() -> None:
    one = yaml.safe_load(show_objects([JOB], "yaml", is_list=False))
    assert one["metadata"] == {"name": "pong", "namespace": "rl"}
    many = yaml.safe_load(show_objects([JOB], "json", is_list=True))
    assert (many["kind"], len(many["items"])) == ("List", 1)
    assert show_objects([JOB, JOB], "name", is_list=True) == "\n".join(["collectorjob.cormorant.dev/pong"] * 2)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (7260, "2h1m"), (172_800, "2d")],
)
def test_ages_read_as_kubectls_do(seconds: int, text: str) -> None:
    assert age(NOW - timedelta(seconds=seconds), NOW) == text


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        (Selection(), ["head-2"]),
        (Selection(is_previous=True), ["head-1"]),
        (Selection(slot="cpu-2"), ["cpu-2-b"]),
        (Selection(slot="cpu-2", is_previous=True), ["cpu-2-a"]),
        (Selection(slot="cpu-10", is_previous=True), []),
        (Selection(is_all=True), ["head-2", "cpu-2-b", "cpu-10-a"]),
        (Selection(is_all=True, is_previous=True), ["head-1", "cpu-2-a"]),
    ],
)
def test_logs_are_of_the_pod_that_is_there_or_of_the_one_before(selection: Selection, names: list[str]) -> None:
    assert [pod.name for pod in selection.choose(PODS)] == names


def test_pod_that_ended_last_is_shown_where_none_lives() -> None:
    (chosen,) = Selection().choose([make_pod("head-1", phase="Failed")])
    assert chosen.name == "head-1"
