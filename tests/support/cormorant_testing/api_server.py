"""An API server behind the methods of the operator's `KubeClient`: objects, versions, preconditions, refusals."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from cormorant_contract.job import KIND
from cormorant_operator.errors import KubeConflict, KubeNotFound, Unreachable
from cormorant_operator.kube.client import error_of

SINCE = "2026-01-01T00:00:00Z"
Raw = dict[str, Any]


class ApiServer:
    """Keeps objects by kind and name."""

    def __init__(self, *, now: Callable[[], str] = lambda: SINCE) -> None:
        """`now`: when objects are created."""
        self._now, self._births = now, Counter[str]()
        self.stored: dict[tuple[str, str], Raw] = {}
        self.requests: list[str] = []
        """Verb and name, `DELETE pong-cpu-0-x`; a dry run is a TRY."""
        self.refused: dict[str, int] = {}
        """Status code by such a request, or by its verb alone."""
        self.refusal: Raw = {}
        """Body of these answers; empty: one that names the object."""
        self.is_away = False
        """Nothing is answered."""
        self.conflicts = 0
        """Writes of a status to another version than the one that is stored."""
        self.page, self.pages = 500, Counter[str]()
        """Objects on a page of a list; pages that were read, by kind."""
        self.unserved = {"PodGroup"}
        """Kinds that it does not know."""
        self.forbidden: set[str] = set()
        """Namespaces whose pods may not be listed."""
        self._version = 100

    def put(self, kind: str, name: str, **metadata: Any) -> Raw:
        return self.keep({"kind": kind, "metadata": {"name": name, "namespace": "team-a", **metadata}})

    def keep(self, manifest: Mapping[str, Any]) -> Raw:
        """Store an object under the next version; no request."""
        kind, metadata = manifest["kind"], manifest["metadata"]
        self._version += 1
        before = self.stored.get((kind, metadata["name"]))
        if before is None:
            uid = f"uid-of-{kind}-{metadata['name']}"
            self._births[uid] += 1
            uid += f"-{self._births[uid]}" if self._births[uid] > 1 else ""
            born = {"uid": uid, "creationTimestamp": self._now(), "generation": 1}
        else:
            born = {key: before["metadata"][key] for key in ("uid", "creationTimestamp", "generation")}
        stored = {**manifest, "metadata": {**born, **metadata, "resourceVersion": str(self._version)}}
        self.stored[kind, metadata["name"]] = stored
        return stored

    def remove(self, kind: str, name: str) -> Raw:
        """Delete an object; no request. Returns what it was."""
        self._version += 1
        return self.stored.pop((kind, name))

    async def create(self, manifest: Mapping[str, Any], *, is_dry_run: bool = False) -> Raw:
        kind, name = manifest["kind"], manifest["metadata"].get("name", "")
        self._note("TRY" if is_dry_run else "POST", name)
        if (kind, name) in self.stored:
            raise error_of(409, {"reason": "AlreadyExists", "message": f"{name} already exists"}, request="POST")
        return dict(manifest) if is_dry_run else self.keep(manifest)

    async def apply(self, manifest: Mapping[str, Any]) -> Raw:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        self._note("APPLY", name)
        return self.keep({**self.stored.get((kind, name), {}), **manifest})

    async def get(self, kind: str, *, namespace: str, name: str) -> Raw:
        self._note("GET", name)
        return self._found(kind, name)

    async def patch(
        self, kind: str, *, namespace: str, name: str, body: Mapping[str, Any], subresource: str = ""
    ) -> Raw:
        self._note("PATCH", f"{name}/{subresource}" if subresource else name)
        before = self._current(kind, body["metadata"], name)
        metadata = {**before["metadata"], **_merged(before["metadata"], body["metadata"], "annotations")}
        return self.keep({**before, "metadata": metadata, **_merged(before, body, "status")})

    async def replace(self, manifest: Mapping[str, Any]) -> Raw:
        name = manifest["metadata"]["name"]
        self._note("PUT", name)
        self._current(manifest["kind"], manifest["metadata"], name)
        return self.keep(manifest)

    async def apply_status(self, manifest: Mapping[str, Any]) -> Raw:
        name = manifest["metadata"]["name"]
        self._note("APPLY", f"{name}/status")
        return self.keep({**self._current(KIND, manifest["metadata"], name), "status": manifest["status"]})

    async def delete(self, kind: str, *, namespace: str, name: str, preconditions: Mapping[str, str]) -> Raw:
        self._note("DELETE", name)
        self._current(kind, preconditions, name)
        return self.remove(kind, name)

    async def list(self, kind: str, *, namespace: str = "", selector: str = "") -> AsyncIterator[tuple[list[Raw], str]]:
        self._note("LIST", kind)
        if kind in self.unserved:
            raise KubeNotFound(404, {"message": "404 page not found"}, request="GET")
        if namespace in self.forbidden and kind == "Pod":
            raise error_of(403, {"message": f"pods is forbidden in {namespace}"}, request="GET pods")
        found = [item for (stored, _), item in self.stored.items() if stored == kind]
        found = [item for item in found if namespace in ("", item["metadata"]["namespace"])]
        version = str(self._version)
        for first in range(0, len(found) or 1, self.page):
            self.pages[kind] += 1
            yield found[first : first + self.page], version

    @property
    def lists(self) -> int:
        return self.asked("LIST")

    def asked(self, verb: str) -> int:
        return sum(request.startswith(f"{verb} ") for request in self.requests)

    def _found(self, kind: str, name: str) -> Raw:
        if (kind, name) not in self.stored:
            raise KubeNotFound(404, {"message": f"{name} not found"}, request="GET")
        return self.stored[kind, name]

    def _current(self, kind: str, metadata: Mapping[str, Any], name: str) -> Raw:
        """What is stored, if it is the object and the version that the request names."""
        before = self._found(kind, name)
        if any(metadata.get(key) not in (None, "", before["metadata"][key]) for key in ("uid", "resourceVersion")):
            self.conflicts += 1
            raise KubeConflict(409, {"reason": "Conflict", "message": "the object has been modified"}, request="PATCH")
        return before

    def _note(self, verb: str, name: str) -> None:
        self.requests.append(f"{verb} {name}")
        if self.is_away:
            raise Unreachable("the API server does not answer")
        if code := self.refused.get(f"{verb} {name}") or self.refused.get(verb):
            raise error_of(code, self.refusal or {"message": f"{name} is not to be touched"}, request=verb)


def _merged(before: Mapping[str, Any], patch: Mapping[str, Any], part: str) -> Raw:
    """A part of an object after a JSON merge patch; None takes a field away."""
    merged = {**before.get(part, {}), **patch.get(part, {})}
    return {part: {key: value for key, value in merged.items() if value is not None}}
