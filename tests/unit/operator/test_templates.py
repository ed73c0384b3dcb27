"""Digests: which pods a change of the spec replaces, and whether Kueue is asked again."""

from typing import Any

import pytest

from cormorant_testing.operator_world import make_job


def of_group(**fields: Any) -> dict[str, Any]:
    return {"workerGroups": [{"name": "cpu", **fields}]}


CPUS = {"requests": {"cpu": "2"}}


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ({}, {"replicas": 5}, ""),
        ({}, {"paused": True}, ""),
        ({}, {"runPolicy": {"maxUnavailable": 3}}, ""),
        ({}, {"image": "other"}, "head worker"),
        ({}, {"code": {"configMap": "mine"}}, "head worker"),
        ({"code": {"configMap": "mine"}}, {"code": {"configMap": "yours"}}, "head worker"),
        ({"code": {"image": "mine:1"}}, {"code": {"image": "mine:2"}}, "head worker"),
        # Workers stay while their head reads a new manifest.
        ({}, {"collection": {"framesPerBatch": 64, "totalFrames": 200_000}}, "head config"),
        ({}, {"head": {"resources": CPUS}}, "head quota"),
        ({}, {"head": {"template": {"spec": {"nodeSelector": {"pool": "cpu"}}}}}, "head quota"),
        ({}, {"head": {"template": {"metadata": {"labels": {"team": "a"}}}}}, "head"),
        (of_group(), of_group(resources=CPUS), "worker quota"),
        (of_group(), of_group(template={"spec": {"nodeSelector": {"pool": "cpu"}}}), "worker quota"),
        (of_group(), of_group(template={"metadata": {"labels": {"team": "a"}}}), "worker"),
        (of_group(), of_group(device="gpu"), "head worker quota config"),
    ],
)
def test_a_change_replaces_the_pods_it_is_about(before: Any, after: Any, changed: str) -> None:
    def digests(spec: dict[str, Any]) -> dict[str, str]:
        templates = make_job(**spec).templates
        (group,) = templates.spec.worker_groups
        worker = templates.worker(group)
        return {"head": templates.head, "worker": worker, "quota": templates.quota, "config": templates.config}

    old, new = digests(before), digests({**before, **after})
    assert {name for name in old if old[name] != new[name]} == set(changed.split())
