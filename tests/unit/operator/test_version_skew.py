"""Specs and statuses that a newer operator, or a newer CRD, has written."""

from dataclasses import replace
from typing import Any

from cormorant_contract.status import CollectorJobStatus
from cormorant_operator import names
from cormorant_operator.job import Job, Unreadable, read_job
from cormorant_testing.operator_world import make_document, running


def read(status: dict[str, Any], **spec: Any) -> Job | Unreadable:
    return read_job({**make_document(**spec), "status": status})


def a_condition(kind: str, status: str = "True", **more: Any) -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": "A", "lastTransitionTime": "2026-01-01T00:00:00Z", **more}


def test_status_of_a_newer_operator_is_read_as_far_as_it_is_known() -> None:
    job = read({"epoch": 4, "frames": {"collected": 7, "novel": 1}, "novelty": {"a": 1}})
    assert not isinstance(job, Unreadable)
    assert (job.status.epoch, job.status.frames.collected) == (4, 7)


def test_words_that_this_operator_does_not_know_are_passed_over() -> None:
    conditions = [a_condition("Ready"), a_condition("Hibernating"), a_condition("Paused", "Perhaps")]
    job = read({"epoch": 4, "phase": "Hibernating", "conditions": conditions, "groups": [{"name": 7}]})
    assert isinstance(job, Job)
    assert (job.status.epoch, job.status.phase, job.status.groups) == (4, CollectorJobStatus().phase, ())
    assert [found.type for found in job.status.conditions] == ["Ready"]


def test_end_whose_words_are_not_known_stays_an_end() -> None:
    job = read({"conditions": [a_condition("Completed", reason="of two words"), a_condition("Ready", "Perhaps")]})
    assert isinstance(job, Job)
    assert [(found.type, found.reason) for found in job.status.conditions] == [("Completed", "Unreadable")]
    assert job.is_over


def test_count_that_cannot_be_read_leaves_the_job_alone() -> None:
    job = read({"epoch": "four", "phase": "Running"})
    assert isinstance(job, Unreadable)
    assert (job.status, "epoch" in job.message) == (None, True)


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
