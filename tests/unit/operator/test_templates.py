"""Digests: which pods a change of the spec replaces, and whether Kueue is asked again."""

from typing import Any

import pytest

from cormorant_contract.spec import CollectorJobSpec
from cormorant_operator.templates import Templates
from cormorant_testing.operator_world import make_job


def of_group(**fields: Any) -> dict[str, Any]:
    return {"workerGroups": [{"name": "cpu", **fields}]}


POLICY = {"entrypoint": "my_pkg:make"}
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
        ({"policy": POLICY}, {"policy": {**POLICY, "dtype": "bfloat16"}}, "head config"),
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


def test_digests_are_those_of_the_last_release() -> None:
    """Computed with v0.2.0: a field that came later leaves its pods alone as long as it has its default."""
    spec = {
        "env": {"envpool": {"taskId": "CartPole-v1", "numEnvs": 4, "numThreads": 1}},
        "policy": {"random": {}},
        "collection": {"framesPerBatch": 256},
        "output": {"queue": {"capacityBatches": 4, "onFull": "drop_oldest"}},
        "head": {"resources": {"requests": {"cpu": "50m"}}},
        "workerGroups": [{"name": "cpu", "resources": {"requests": {"cpu": "50m"}}}],
        "replicas": 1,
    }
    templates = Templates(CollectorJobSpec.model_validate(spec))
    (group,) = templates.spec.worker_groups
    assert (templates.config, templates.head, templates.worker(group)) == ("stk65s4f", "vvldcc2x", "4aax2gtz")
