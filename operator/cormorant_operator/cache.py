"""What the operator has seen of the cluster: jobs and what they own, by the job's uid. Belongs to one event loop.

Fed by watches, by lists, and by the answers to the operator's own writes: what it has created is there at once, so a
late watch cannot make it create twice. Versions of one object never go back.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cormorant_operator.job import Job, Unreadable, read_job
from cormorant_operator.observed import Pod, Roster
from cormorant_operator.pod_facts import birth_of, controller_uid, read_pod
from cormorant_operator.render.children import digest_of

_MOST_GRAVES = 20_000
Kind = str


@dataclass(slots=True)
class _Seen:
    """One object: whose it is, and what is kept of it."""

    owner: str
    version: int
    fact: Pod | str
    name: str
    kind: Kind


@dataclass(slots=True)
class _Family:
    """What is known of one uid of a job."""

    namespace: str
    job: Job | Unreadable | None = None
    version: int = 0
    members: dict[str, _Seen] = field(default_factory=dict)
    """By the member's uid."""
    roster: Roster = field(default_factory=Roster)
    """The pods among the members."""
    attempts: dict[tuple[str, int], int] = field(default_factory=dict)
    """Highest attempt that was ever seen of each slot, by group and index: also of pods that left no record."""
    epoch: int = 0
    """Highest epoch of a head that was ever seen."""


class Cache:
    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._owners: dict[str, str] = {}
        """Owner of each member, by the member's uid."""
        self._graves: OrderedDict[str, float] = OrderedDict()
        """What was deleted, and the version at which it was gone: late answers do not bring it back. A newer version
        does: a watch calls it a deletion, too, when an object loses the labels that are watched."""

    def see(self, raw: Mapping[str, Any], *, is_deleted: bool = False) -> str:
        """Take notice of an object. Returns the uid of the job concerned; empty when it is nobody's, or no news."""
        metadata = raw["metadata"]
        uid, version = metadata["uid"], _version(metadata)
        if is_deleted:
            self.note_birth(raw)
            return self._bury(uid, is_job=raw["kind"] == "CollectorJob", version=version)
        if version <= self._graves.get(uid, -1):
            return ""
        if raw["kind"] == "CollectorJob":
            return self._see_job(raw, uid, version)
        return self._see_member(raw, uid, version)

    def prune(self, kind: Kind, uids: Iterable[str], *, version: str, namespace: str = "") -> set[str]:
        """Forget what a complete list did not show: watches that broke off do not tell of what went meanwhile.

        Args:
            kind: of the list.
            uids: that it showed.
            version: of the world that it showed; what is newer is kept.
            namespace: that was listed; empty: all.

        Returns:
            Uids of the jobs concerned.
        """
        shown, limit = set(uids), int(version) if version.isdecimal() else 0
        listed = {uid: family for uid, family in self._families.items() if namespace in ("", family.namespace)}
        if kind == "CollectorJob":
            gone = [u for u, f in listed.items() if f.job is not None and u not in shown and f.version <= limit]
            return {owner for uid in gone if (owner := self._bury(uid, is_job=True, version=limit))}
        members = [
            uid
            for family in listed.values()
            for uid, seen in family.members.items()
            if seen.kind == kind and uid not in shown and seen.version <= limit
        ]
        return {owner for uid in members if (owner := self._bury(uid, is_job=False, version=limit))}

    def job(self, uid: str) -> Job | Unreadable | None:
        """A job; None when it is gone."""
        family = self._families.get(uid)
        return family.job if family is not None else None

    def jobs(self, namespace: str = "") -> list[str]:
        """Uids of every job, or of those of a namespace."""
        return [
            uid
            for uid, family in self._families.items()
            if family.job is not None and namespace in ("", family.namespace)
        ]

    def pods(self, uid: str) -> tuple[Pod, ...]:
        family = self._families.get(uid)
        return tuple(family.roster.pods.values()) if family is not None else ()

    def roster(self, uid: str) -> Roster:
        """The same, sorted by whether they need a look; it changes with the next event."""
        family = self._families.get(uid)
        return family.roster if family is not None else Roster()

    def attempts(self, uid: str) -> Mapping[tuple[str, int], int]:
        """Highest attempt that was ever seen of each slot of a job, by group and index; changes with the next event."""
        family = self._families.get(uid)
        return family.attempts if family is not None else {}

    def epoch(self, uid: str) -> int:
        """Highest epoch of a head of a job that was ever seen; 0 when none was."""
        family = self._families.get(uid)
        return family.epoch if family is not None else 0

    def is_past(self, manifest: Mapping[str, Any]) -> bool:
        """Whether a pod that is to be made was made before, or one after it: by this operator or another."""
        role, place, number = birth_of(manifest)
        family = self._families.get(controller_uid(manifest))
        if family is None:
            return False
        return number <= (family.epoch if role == "head" else family.attempts.get(place, -1))

    def note_birth(self, raw: Mapping[str, Any]) -> None:
        """A pod like this one existed, seen or not: its name is never used again."""
        family = self._families.get(controller_uid(raw))
        if raw["kind"] != "Pod" or family is None:
            return
        role, place, number = birth_of(raw)
        if role == "head":
            family.epoch = max(family.epoch, number)
        elif role == "worker":
            family.attempts[place] = max(family.attempts.get(place, -1), number)

    def children(self, uid: str) -> dict[tuple[str, str], str]:
        """Digests of a job's Services and ConfigMaps, by kind and name."""
        family = self._families.get(uid)
        if family is None:
            return {}
        return {(s.kind, s.name): s.fact for s in family.members.values() if isinstance(s.fact, str)}

    def bury(self, uid: str) -> None:
        """A member is known to be gone."""
        self._bury(uid, is_job=False, version=math.inf)

    def _see_job(self, raw: Mapping[str, Any], uid: str, version: int) -> str:
        family = self._families.setdefault(uid, _Family(raw["metadata"]["namespace"]))
        if family.job is not None and version <= family.version:
            return ""
        family.job, family.version = read_job(raw, before=family.job), version
        return uid

    def _see_member(self, raw: Mapping[str, Any], uid: str, version: int) -> str:
        before = self._member(uid)
        if before is not None and version <= before.version:
            return ""
        owner = controller_uid(raw)
        fact = read_pod(raw) if raw["kind"] == "Pod" else digest_of(raw)
        if not owner or fact is None:
            # Another client took our labels or our reference away.
            return self._bury(uid, is_job=False, version=version)
        family = self._families.setdefault(owner, _Family(raw["metadata"]["namespace"]))
        self.note_birth(raw)
        family.members[uid] = _Seen(owner, version, fact, raw["metadata"]["name"], raw["kind"])
        if isinstance(fact, Pod):
            family.roster.put(fact)
        self._owners[uid] = owner
        return owner

    def _member(self, uid: str) -> _Seen | None:
        family = self._families.get(self._owners.get(uid, ""))
        return family.members.get(uid) if family is not None else None

    def _bury(self, uid: str, *, is_job: bool, version: float) -> str:
        self._graves[uid] = max(version, self._graves.get(uid, -1))
        if len(self._graves) > _MOST_GRAVES:
            self._graves.popitem(last=False)
        owner = uid if is_job else self._owners.pop(uid, "")
        family = self._families.get(owner)
        if family is None:
            return ""
        if is_job:
            family.job = None
        else:
            family.members.pop(uid, None)
            family.roster.drop(uid)
        if family.job is None and not family.members:
            del self._families[owner]
        return owner


def _version(metadata: Mapping[str, Any]) -> int:
    text = metadata.get("resourceVersion") or ""
    return int(text) if text.isdecimal() else 0
