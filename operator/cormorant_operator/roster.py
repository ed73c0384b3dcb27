"""The pods of a job, sorted by whether they need a look: of thousands of workers, one changes at a time.

A worker is calm when it is alone in its slot, ready, and nothing is marked on it. Calm workers are counted by what they
were made from; all other pods are gone through. The cache keeps a roster pod by pod, and `Roster.of` makes the same of
all pods at once.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cormorant_operator.observed import Obstacle, Pod

Place = tuple[str, int]
"""A slot, by group and index."""


class Make(NamedTuple):
    """What calm workers were made from."""

    group: str
    template: str
    base_image: str


class Roster:
    """The pods of one job. Changed by the cache only, between two reconciles."""

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        """Every pod by uid."""
        self.restless: dict[str, Pod] = {}
        """Heads, canaries, and workers that are not calm, by uid."""
        self.calm: dict[Make, dict[int, Pod]] = {}
        """Calm workers by what they were made from, and by index."""
        self.restarts: Counter[Make] = Counter()
        """Failures that the slots of calm workers ever had."""
        self._places: defaultdict[Place, dict[str, Pod]] = defaultdict(dict)
        """Workers of each slot, by uid."""

    @classmethod
    def of(cls, pods: Iterable[Pod]) -> "Roster":
        """The roster of some pods."""
        roster = cls()
        for pod in pods:
            roster.put(pod)
        return roster

    def put(self, pod: Pod) -> None:
        """A pod is there, or has changed."""
        self.drop(pod.uid)
        self.pods[pod.uid] = pod
        if pod.role != "worker":
            self.restless[pod.uid] = pod
            return
        place = self._places[pod.group, pod.index]
        self._take_out(place)
        place[pod.uid] = pod
        self._sort_in(place)

    def drop(self, uid: str) -> None:
        pod = self.pods.pop(uid, None)
        if pod is None:
            return
        if pod.role != "worker":
            del self.restless[uid]
            return
        place = self._places[pod.group, pod.index]
        self._take_out(place)
        del place[uid]
        if place:
            self._sort_in(place)
        else:
            del self._places[pod.group, pod.index]

    def _sort_in(self, place: Mapping[str, Pod]) -> None:
        """Each pod of a slot becomes calm or restless."""
        if len(place) == 1:
            (pod,) = place.values()
            if _is_calm(pod):
                make = _make_of(pod)
                self.calm.setdefault(make, {})[pod.index] = pod
                self.restarts[make] += pod.restarts
                return
        self.restless.update(place)

    def _take_out(self, place: Mapping[str, Pod]) -> None:
        """The opposite, before a slot changes."""
        for uid, pod in place.items():
            if self.restless.pop(uid, None) is None:
                make = _make_of(pod)
                del self.calm[make][pod.index]
                self.restarts[make] -= pod.restarts
                if not self.calm[make]:
                    del self.calm[make], self.restarts[make]


def _is_calm(pod: Pod) -> bool:
    return (
        pod.ready_since is not None
        and pod.is_scheduled
        and pod.is_ready
        and not pod.failures
        and not pod.is_disrupted
        and pod.obstacle is Obstacle.NONE
        and pod.retiring_since is None
        and pod.draining_since is None
        and pod.stalled_since is None
    )


def _make_of(pod: Pod) -> Make:
    return Make(pod.group, pod.template, pod.base_image)
