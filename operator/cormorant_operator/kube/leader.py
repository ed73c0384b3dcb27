"""Leader election by a Lease: one operator works, the others wait.

Correctness does not depend on it: names are computed, so two operators that see the same cluster ask for the same
objects. It avoids duplicate work, and the rare case of an operator that acts on an outdated view. Unlike the official
client's election it uses a monotonic clock, bounds each call, and releases the lease on exit.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime

import structlog

from cormorant_operator.errors import KubeConflict, KubeError, KubeNotFound, LeaseLost, Unreachable
from cormorant_operator.kube.client import KubeClient, Purpose, purpose
from cormorant_operator.names import Manifest

log = structlog.get_logger()
_LASTS_S, _RENEW_WITHIN_S, _RETRY_S = 15.0, 10.0, 2.0
"""A lease that was not renewed for so long is free; a leader that cannot renew it for so long gives up before."""


class Leader:
    def __init__(self, leases: KubeClient, *, namespace: str, name: str, identity: str) -> None:
        """`identity` must be unique among candidates."""
        self._leases, self._namespace, self._name, self._identity = leases, namespace, name, identity
        self.is_leading = False
        self._seen: tuple[str, str] = ("", "")
        """Last seen holder and renewTime. Compared for equality only, because clocks of machines differ."""
        self._seen_at = 0.0

    async def acquire(self) -> None:
        """Wait until this candidate holds the lease."""
        while True:
            try:
                async with asyncio.timeout(_RENEW_WITHIN_S):
                    if await self._try():
                        self.is_leading = True
                        log.info("leading", identity=self._identity)
                        return
            except (KubeError, Unreachable, TimeoutError) as error:
                log.warning("lease_not_read", reason=repr(error))
            await asyncio.sleep(_RETRY_S)

    async def keep(self) -> None:
        """Renew the lease. Raises LeaseLost once it was not renewed in time, or another operator holds it."""
        renewed_at = time.monotonic()
        while True:
            await asyncio.sleep(_RETRY_S)
            left_s = _RENEW_WITHIN_S - (time.monotonic() - renewed_at)
            try:
                async with asyncio.timeout(max(0.1, left_s)):
                    if not await self._try():
                        self.is_leading = False
                        raise LeaseLost(f"lease {self._name} is now held by {self._seen[0]}")
                renewed_at = time.monotonic()
            except (KubeError, Unreachable, TimeoutError) as error:
                if time.monotonic() - renewed_at >= _RENEW_WITHIN_S:
                    self.is_leading = False
                    raise LeaseLost(
                        f"could not renew lease {self._name} for {_RENEW_WITHIN_S:.0f} s: {error!r}"
                    ) from error

    async def release(self) -> None:
        """Release the lease, so that another operator takes over at once. Never raises."""
        if not self.is_leading:
            return
        self.is_leading = False
        try:
            async with asyncio.timeout(_RETRY_S):
                lease = await self._leases.get("Lease", namespace=self._namespace, name=self._name)
                if lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"] = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._leases.replace(lease)
        except (KubeError, Unreachable, TimeoutError) as error:
            log.warning("lease_not_released", reason=repr(error))

    async def _try(self) -> bool:
        """Take or renew the lease. Returns whether this candidate holds it."""
        with purpose(Purpose.LEASE):
            metadata = {"name": self._name, "namespace": self._namespace}
            lease: Manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
            write: Callable[[Manifest], Awaitable[Manifest]] = self._leases.create
            with suppress(KubeNotFound):
                lease, write = await self._leases.get("Lease", **metadata), self._leases.replace
            before = lease.get("spec") or {}
            holder = before.get("holderIdentity") or ""
            seen = holder, before.get("renewTime") or ""
            if seen != self._seen:
                self._seen, self._seen_at = seen, time.monotonic()
            is_renewal = holder == self._identity
            if holder and not is_renewal and time.monotonic() - self._seen_at < _LASTS_S:
                return False
            now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            spec = {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": round(_LASTS_S),
                "acquireTime": before.get("acquireTime", now) if is_renewal else now,
                "renewTime": now,
                "leaseTransitions": before.get("leaseTransitions", 0) + (bool(before) and not is_renewal),
            }
            try:
                await write({**lease, "spec": spec})
            except KubeConflict:
                return False  # another candidate was faster
            self._seen, self._seen_at = (self._identity, now), time.monotonic()
            return True
