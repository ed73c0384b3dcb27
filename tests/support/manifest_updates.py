"""Changes of a manifest that an API server accepts or refuses."""

from dataclasses import dataclass

from manifest_making import Document, gymnasium, manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A valid manifest that becomes another valid one, and the field that must not change (empty: all may)."""

    old: Document
    new: Document
    path: str = ""


_ACTOR = {"entrypoint": "a:b", "kwargs": {"hidden": [64]}}
UPDATES: dict[str, Update] = {
    "scaled": Update(old=manifest(), new=manifest(replicas=3)),
    "more-frames": Update(old=manifest(), new=manifest(collection__totalFrames=128)),
    "other-exploration": Update(old=manifest(policy=_ACTOR), new=manifest(policy=_ACTOR | {"explorationType": "mode"})),
    "compiled": Update(old=manifest(policy=_ACTOR), new=manifest(policy=_ACTOR | {"compile": "auto"})),
    "other-task": Update(old=manifest(), new=manifest(env__envpool__taskId="Breakout-v5"), path="spec.env"),
    "other-env-kwargs": Update(old=manifest(), new=manifest(env__envpool__kwargs={"a": {"b": 1}}), path="spec.env"),
    "other-kind-of-env": Update(old=manifest(), new=gymnasium(), path="spec.env"),
    "other-entrypoint": Update(
        old=manifest(policy=_ACTOR), new=manifest(policy=_ACTOR | {"entrypoint": "a:c"}), path="spec.policy"
    ),
    "other-policy-kwargs": Update(
        old=manifest(policy=_ACTOR),
        new=manifest(policy=_ACTOR | {"kwargs": {"hidden": [32]}}),
        path="spec.policy.kwargs",
    ),
    "random-to-entrypoint": Update(old=manifest(), new=manifest(policy={"entrypoint": "a:b"}), path="spec.policy"),
    "other-agents": Update(
        old=manifest(policy={"agents": {"red": _ACTOR}}),
        new=manifest(policy={"agents": {"red": _ACTOR | {"version": 3}}}),
        path="spec.policy",
    ),
    "another-controller": Update(
        old=manifest(), new=manifest(managedBy="example.com/controller"), path="spec.managedBy"
    ),
}
