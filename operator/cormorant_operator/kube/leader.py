"""Leader election by a Lease: of several operators one works, the others wait.

Correctness does not hang on it: names are computed, and two operators that see the same world want the same. It spares
double work, and the narrow case in which one of them sees an older world. Unlike the official client's election it
measures with a monotonic clock, bounds each call, and gives the lease back when it ends.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import structlog

from cormorant_operator.errors import ApiError, Conflict, LeaseLost, NotFound, Unreachable
from cormorant_operator.kube.rate_limit import Purpose, purpose

log = structlog.get_logger()


class Leases(Protocol):
    """What it asks of the API server: `cluster.KubeClient`."""

    async def get(self, kind: str, *, namespace: str, name: str) -> dict[str, Any]: ...

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Create an object, or only try to."""
        ...

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Replace an object of this version."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    lasts_s: float = 15.0
    """A lease that nobody renewed for so long is free."""
    renew_within_s: float = 10.0
    """A leader that could not renew for so long gives up: before others may begin."""
    retry_s: float = 2.0


class Leader:
    def __init__(
        self, leases: Leases, *, namespace: str, name: str, identity: str, terms: Terms, clock: Callable[[], float]
    ) -> None:
        """Ask for nothing yet.

        Args:
            leases: the API server.
            namespace: where the Lease is.
            name: of the Lease.
            identity: of this candidate; no other has it.
            terms: times.
            clock: monotonic seconds.
        """
        self._leases, self._namespace, self._name = leases, namespace, name
        self._identity, self._terms, self._clock = identity, terms, clock
        self.is_leading = False
        self._seen: tuple[str, str] = ("", "")
        """Holder and renewal that were seen last; compared, never believed: clocks of machines differ."""
        self._seen_at = 0.0

    async def acquire(self) -> None:
        """Wait until this candidate leads."""
        while True:
            try:
                async with asyncio.timeout(self._terms.renew_within_s):
                    if await self._try():
                        self.is_leading = True
                        log.info("leading", identity=self._identity)
                        return
            except (ApiError, Unreachable, TimeoutError) as error:
                log.warning("lease_not_read", reason=repr(error))
            await asyncio.sleep(self._terms.retry_s)

    async def keep(self) -> None:
        """Renew for ever.

        Raises:
            LeaseLost: it could not be renewed in time, or somebody else leads.
        """
        renewed_at = self._clock()
        while True:
            await asyncio.sleep(self._terms.retry_s)
            left_s = self._terms.renew_within_s - (self._clock() - renewed_at)
            try:
                async with asyncio.timeout(max(0.1, left_s)):
                    if not await self._try():
                        self.is_leading = False
                        raise LeaseLost(f"lease {self._name} is now held by {self._seen[0]}")
                renewed_at = self._clock()
            except (ApiError, Unreachable, TimeoutError) as error:
                if self._clock() - renewed_at >= self._terms.renew_within_s:
                    self.is_leading = False
                    raise LeaseLost(
                        f"could not renew lease {self._name} for {self._terms.renew_within_s:.0f} s: {error!r}"
                    ) from error

    async def release(self) -> None:
        """Let the next one begin at once. Never raises: the lease runs out by itself."""
        if not self.is_leading:
            return
        self.is_leading = False
        try:
            async with asyncio.timeout(self._terms.retry_s):
                lease = await self._leases.get("Lease", namespace=self._namespace, name=self._name)
                if lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"] = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._leases.replace(lease)
        except (ApiError, Unreachable, TimeoutError) as error:
            log.warning("lease_not_released", reason=repr(error))

    async def _try(self) -> bool:
        """Take or renew the lease. Returns whether it is ours."""
        with purpose(Purpose.LEASE):
            return await self._take_or_renew()

    async def _take_or_renew(self) -> bool:
        try:
            lease = await self._leases.get("Lease", namespace=self._namespace, name=self._name)
        except NotFound:
            return await self._write(None)
        spec = lease.get("spec") or {}
        holder, seen = spec.get("holderIdentity") or "", (spec.get("holderIdentity") or "", spec.get("renewTime") or "")
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._clock()
        is_free = not holder or self._clock() - self._seen_at >= self._terms.lasts_s
        return await self._write(lease) if holder == self._identity or is_free else False

    async def _write(self, lease: dict[str, Any] | None) -> bool:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        before = (lease or {}).get("spec") or {}
        is_renewal = before.get("holderIdentity") == self._identity
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": round(self._terms.lasts_s),
            "acquireTime": before.get("acquireTime", now) if is_renewal else now,
            "renewTime": now,
            "leaseTransitions": before.get("leaseTransitions", 0) + (lease is not None and not is_renewal),
        }
        try:
            if lease is None:
                metadata = {"name": self._name, "namespace": self._namespace}
                manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
                await self._leases.create({**manifest, "spec": spec})
            else:
                await self._leases.replace({**lease, "spec": spec})
        except Conflict:
            return False  # another candidate was quicker
        self._seen, self._seen_at = (self._identity, now), self._clock()
        return True
