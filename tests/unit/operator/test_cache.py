"""What the operator has seen, however late and in whatever order it is told."""

from typing import Any

from cormorant_contract.children import ATTEMPT, EPOCH, GROUP, INDEX, ROLE
from cormorant_operator.cache import Cache
from cormorant_operator.job import Job
from cormorant_testing.operator_world import make_spec
from manifest_making import collector_job


def job(*, version: int = 1, uid: str = "j1", **spec: Any) -> dict[str, Any]:
    return collector_job("pong", make_spec(**spec), namespace="a", uid=uid, resourceVersion=str(version))


def pod(
    *, version: int = 2, uid: str = "p1", owner: str = "j1", phase: str = "Pending", attempt: int = 0
) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {
            "name": "pong-cpu-0-x",
            "namespace": "a",
            "uid": uid,
            "resourceVersion": str(version),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {ROLE: "worker", GROUP: "cpu", INDEX: "3", ATTEMPT: str(attempt)},
            "ownerReferences": [{"uid": owner, "controller": True}] if owner else [],
        },
        "status": {"phase": phase},
    }


def test_news_name_the_job_and_old_news_nobody() -> None:
    cache = Cache()
    assert cache.see(job(version=5)) == "j1"
    assert cache.see(job(version=5)) == ""
    assert cache.see(job(version=4, replicas=9)) == ""
    found = cache.job("j1")
    assert isinstance(found, Job)
    assert found.spec.replicas == 2
    assert cache.see(pod(version=9)) == "j1"
    assert cache.see(pod(version=10, phase="Running")) == "j1", "versions are compared as numbers"
    assert cache.see(pod(version=9)) == ""
    assert [p.phase for p in cache.record("j1").pods] == ["Running"]


def test_what_was_deleted_is_not_brought_back_by_a_late_answer() -> None:
    cache = Cache()
    cache.see(job())
    cache.see(pod())
    assert cache.see(pod(version=5), is_deleted=True) == "j1"
    assert cache.see(pod(version=4)) == ""
    assert cache.record("j1").pods == ()


def test_pods_before_without_and_of_another_job_are_kept_apart() -> None:
    cache = Cache()
    cache.see(pod())
    assert (cache.job("j1"), cache.jobs()) == (None, [])
    cache.see(job())
    cache.see(job(uid="j2", version=8))  # made again under its name
    cache.see(pod(uid="p2", owner="j2"))
    assert [len(cache.record(uid).pods) for uid in ("j1", "j2")] == [1, 1]
    assert cache.see(pod(version=9, owner="")) == "j1"
    assert cache.record("j1").pods == ()


def test_complete_list_buries_what_a_broken_watch_never_told_of() -> None:
    cache = Cache()
    cache.see(job(version=1))
    cache.see(pod(version=2))
    cache.see(pod(version=9, uid="newer"))
    assert cache.prune("Pod", [], version="5", namespace="another") == set()
    assert cache.prune("Pod", [], version="5") == {"j1"}
    assert [p.uid for p in cache.record("j1").pods] == ["newer"], "what came after the list stays"
    assert cache.prune("CollectorJob", [], version="5") == {"j1"}
    assert cache.job("j1") is None


def test_everything_of_a_deleted_job_is_forgotten() -> None:
    cache = Cache()
    cache.see(job())
    cache.see(pod())
    cache.see(job(version=3), is_deleted=True)
    assert cache.jobs() == []
    cache.see(pod(version=4), is_deleted=True)
    assert cache._records == {}


def test_attempts_of_vanished_and_unseen_pods_are_remembered() -> None:
    cache = Cache()
    cache.see(job())
    assert (cache.record("j1").attempts, cache.is_past(pod(attempt=0))) == ({}, False)
    cache.see(pod(attempt=4))
    cache.see(pod(attempt=4, version=3), is_deleted=True)
    assert cache.record("j1").attempts == {("cpu", 3): 4}
    cache.see(pod(attempt=6, uid="never-seen", version=9), is_deleted=True)
    cache.see(pod(attempt=5, uid="late", version=5))
    assert cache.record("j1").attempts == {("cpu", 3): 6}
    assert [cache.is_past(pod(attempt=attempt)) for attempt in (0, 6, 7)] == [True, True, False]
    assert not cache.is_past(pod(owner="j2", attempt=0)), "another job of that name"


def test_epochs_are_remembered_of_heads_that_left_no_record() -> None:
    cache = Cache()
    cache.see(job())
    head = pod(uid="h")
    head["metadata"]["labels"] = {ROLE: "head", EPOCH: "2"}
    cache.see(head)
    cache.see(head, is_deleted=True)
    assert (cache.record("j1").epoch, cache.is_past(head), cache.record("j1").attempts) == (2, True, {})


def test_job_that_left_a_shard_and_comes_back_still_has_its_pods() -> None:
    cache = Cache()
    cache.see(job(version=3))
    cache.see(pod(version=4, attempt=2))
    # To a watch with a selector, a job whose labels no longer match is deleted.
    assert cache.see(job(version=5), is_deleted=True) == "j1"
    assert cache.jobs() == []
    assert cache.see(pod(version=6, uid="p2", attempt=3)) == "j1"
    assert cache.see(job(version=4)) == ""
    assert cache.see(job(version=8)) == "j1"
    assert [p.attempt for p in cache.record("j1").pods] == [2, 3]
    assert cache.record("j1").attempts == {("cpu", 3): 3}
