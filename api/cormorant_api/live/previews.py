"""Previews of single environments: cached for simultaneous viewers, and rate-limited so that workers are not slowed."""

import threading
import time
from collections import OrderedDict

from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.live.pictures import find_picture, newest_frame, png_of
from cormorant_contract.rest.problems import ProblemType
from cormorant_worker.errors import FleetError
from cormorant_worker.spaces import describe

_FRESH_S = 0.2
_SPACING_S = 0.02
"""Shortest time between two requests to workers."""
_MOST_ASKING = 4
_MOST_KEPT = 64


class Previews:
    def __init__(self, head: Head) -> None:
        self._head = head
        self._lock = threading.Lock()
        """Guards everything below."""
        self._kept: OrderedDict[tuple[str, int], tuple[float, bytes]] = OrderedDict()
        self._asking = 0
        self._next_at = 0.0

    async def peek(self, worker: str, env: int) -> bytes:
        """The current observation of one environment as PNG, at most 0.2 s old.

        Raises:
            ApiError: 404, unknown worker; 409, observations are not images; 422, unknown environment; 429, too many
                requests.
            CormorantError: the worker does not respond.
        """
        layout = self._head.running.fleet.layout
        if env >= layout.num_envs:
            known = f"workers have {layout.num_envs} environments each, 0 to {layout.num_envs - 1}"
            raise ApiError(ProblemType.INVALID_REQUEST, f"there is no environment {env}; {known}")
        picture = find_picture(layout.observation)
        if picture is None:
            space = describe(self._head.running.fleet.spaces[0])
            raise ApiError(
                ProblemType.NO_PICTURE, f"observations are not images (uint8 arrays with height and width): {space}"
            )
        with self._lock:
            now = time.monotonic()
            made_at, png = self._kept.get((worker, env), (0.0, b""))
            if png and now - made_at < _FRESH_S:
                return png
            if self._asking >= _MOST_ASKING or now < self._next_at:
                raise ApiError(ProblemType.BUSY, "too many preview requests; retry", retry_after_s=1)
            self._asking += 1
            self._next_at = now + _SPACING_S
        try:
            return await self._head.bulk(self._ask, worker, env, picture.leaf)
        finally:
            with self._lock:
                self._asking -= 1

    def _ask(self, worker: str, env: int, leaf: int) -> bytes:
        fleet = self._head.running.fleet
        try:
            pixels = fleet.peek(worker, column=env, leaf=leaf)
        except FleetError:
            known = tuple(found.name for found in fleet.stats().workers)
            if worker in known:
                raise
            raise ApiError(ProblemType.UNKNOWN_WORKER, f"there is no worker {worker[:80]!r}", known=known) from None
        png = png_of(newest_frame(pixels))
        with self._lock:
            self._kept[worker, env] = time.monotonic(), png
            self._kept.move_to_end((worker, env))
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return png
