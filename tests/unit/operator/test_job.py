"""How a job is read: digests of its spec, and what a newer operator or a newer CRD has written."""

from dataclasses import replace
from typing import Any

import pytest

from cormorant_contract.status import CollectorJobStatus
from cormorant_operator import names
from cormorant_operator.job import Job, Unreadable, read_job
from cormorant_testing.operator_world import make_document, make_job, running


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


def read(status: dict[str, Any], **spec: Any) -> Job | Unreadable:
    return read_job({**make_document(**spec), "status": status})


def a_condition(kind: str, status: str = "True", **more: Any) -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": "A", "lastTransitionTime": "2026-01-01T00:00:00Z", **more}


def test_words_that_this_operator_does_not_know_are_passed_over() -> None:
    conditions = [a_condition("Ready"), a_condition("Hibernating"), a_condition("Paused", "Perhaps")]
    given = {"epoch": 4, "frames": {"collected": 7, "novel": 1}, "novelty": {"a": 1}, "phase": "Hibernating"}
    job = read({**given, "conditions": conditions, "groups": [{"name": 7}]})
    assert isinstance(job, Job)
    assert (job.status.epoch, job.status.frames.collected) == (4, 7)
    assert (job.status.phase, job.status.groups) == (CollectorJobStatus().phase, ())
    assert [found.type for found in job.status.conditions] == ["Ready"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"epoch": "four", "phase": "Running"}, "epoch"),
        ({"conditions": [a_condition("Completed", reason="of two words"), a_condition("Ready", "Perhaps")]}, "reason"),
    ],
)
def test_count_or_end_that_cannot_be_read_leaves_the_job_alone(status: dict[str, Any], words: str) -> None:
    job = read(status)
    assert isinstance(job, Unreadable)
    assert (job.status, words in job.message) == (None, True)


def test_fields_of_a_newer_schema_are_said_and_replace_no_pod() -> None:
    world = running()
    world.job = replace(world.job, unknown=("spec.env.variants",))
    world.settle()
    assert world.condition("Accepted") == "True/UnknownFields"
    assert world.message("Accepted").startswith(
        "this operator does not know spec.env.variants; it ignores these fields"
    )
    assert world.told[-1] == "UnknownFields"
    # Their pods are of templates that this operator cannot make out.
    pods = set(world.pods)
    starting = world.live()[1].name
    for name in pods:
        labels = world.api.stored["Pod", name]["metadata"]["labels"]
        world.change(name, labels={**labels, names.TEMPLATE: "of-a-newer-operator"})
    world.unready(starting)
    world.settle()
    assert set(world.pods) == pods
    world.finish(world.live()[0].name)
    world.run()
    assert world.slots() == ["cpu-0", "cpu-1"]


def test_fields_of_a_newer_schema_are_dropped_with_their_places() -> None:
    job = read({}, novelty=1, collection={"framesPerBatch": 64, "novel": {"a": 1}})
    assert isinstance(job, Job)
    assert job.unknown == ("spec.novelty", "spec.collection.novel")
    plain = read({}, collection={"framesPerBatch": 64})
    assert isinstance(plain, Job)
    assert job.templates.config == plain.templates.config
