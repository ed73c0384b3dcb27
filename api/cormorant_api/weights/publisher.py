"""Publishing weights: verify, store, hand to the fleet; one publish at a time.

    upload -> specs -> conditions -> written -> fleet -> receipts -> kept
              422      409, 412      503        503                  a warning

A publish is refused only before a worker, a reader or the next head can see it. A later problem is a warning: the
publish is valid, and a client that got an error would publish twice. A disk that does not respond blocks only the
writer's threads, and delays a publish for a limited time.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import structlog

from cormorant_api.errors import ApiError, StoreError
from cormorant_api.http.bodies import Received, parse_body
from cormorant_api.notifier import EventRing
from cormorant_api.weights.store import StoredModel, StoredVersion, WeightStore, cut, digest_of, joined
from cormorant_api.weights.updates import UpdateTracker, update_id
from cormorant_contract.rest.base import VERSION_MAX, make_etag
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.rest.updates import Update, UpdateTimings, WorkerCounts
from cormorant_worker.errors import CormorantError
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.weights.blob import WeightsBlob
from cormorant_worker.weights.cached import Offer, read_cached
from cormorant_worker.weights.staged import verify

if TYPE_CHECKING:
    from cormorant_api.traces import Traces

log = structlog.get_logger()

HIGHEST_CHOSEN = 2**52
"""Highest version that a client may choose; leaves room for automatic numbers above it."""
_SLOWEST_BYTES_PER_S = 10e6
"""A publish stops waiting for a disk slower than this."""
_MOST_FLUSHES = 8
ALL_MODELS = ""
"""Stands for several models in one publish."""


class WeightPublisher:
    """Assigns all version numbers. Methods block; call them in worker threads."""

    def __init__(
        self, fleet: WorkerFleet, store: WeightStore, tracker: UpdateTracker, events: EventRing, traces: "Traces | None"
    ) -> None:
        self.store, self.tracker = store, tracker
        self._fleet, self._events, self._traces = fleet, events, traces
        self._publishing = threading.Lock()
        """Held from the version check until the fleet has the weights."""
        self.published_version = 0
        """Newest version that earlier heads published. Assigned numbers are higher, even if it is lost."""
        self.within_s = 10.0
        """How long a publish waits for the disk, in addition to the time for its bytes."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weights")
        """Writes to the store, one at a time, in order."""
        self._flusher = ThreadPoolExecutor(_MOST_FLUSHES, thread_name_prefix="flush")

    @property
    def version(self) -> int:
        """The newest published version of any model."""
        return max(self.store.newest, self._fleet.version)

    def update(self, version: int) -> Update | None:
        """The update of a version; only its metadata if an earlier head published it."""
        if (tracked := self.tracker.find(version)) is not None:
            return tracked
        stored = self.store.version(version)
        return None if stored is None else _describe(stored)

    def publish(
        self,
        blob: WeightsBlob,
        received: Received,
        *,
        model: str,
        version: int | None,
        author: str,
        headers: Mapping[str, str],
    ) -> tuple[Update, bool]:
        """Verify, store and hand over. Returns the update, and whether it is new. After an ApiError, or a
        CormorantError of the fleet, nothing is published.

        Args:
            model: the model in the path; ALL_MODELS for several.
            version: None: the next version.
            headers: of the request, for preconditions and traces.
        """
        began = time.monotonic()
        self._verify(blob, model)
        if not self._fleet.job.spec.policy.allow_nonfinite:
            blob.check_finite()
        verify_ms = (time.monotonic() - began) * 1000
        limit_s = self._limit_s(blob.size_bytes)
        if not self._publishing.acquire(timeout=limit_s):
            raise ApiError(
                ProblemType.STORE_FAILED,
                f"an earlier publish has not ended after {limit_s:.0f} s; nothing was published; retry",
                retry_after_s=5,
            )
        try:
            current = self.version
            known = None if version is None else self.update(version)
            if known is not None and known.digest == received.digest and model in (ALL_MODELS, *known.models):
                return known, False  # a retry changes nothing, even if its bytes expired
            check_preconditions(headers, self._current_etag(model))
            number = self._number(version, current)
            if self._fleet.statistics is not None and blob.statistics is None:
                blob.statistics = self._fleet.statistics.current
            try:
                stored = self._put(_stored(blob, received.digest, number, author))
            except StoreError as error:
                log.exception("weights_not_kept", version=number)
                raise ApiError(ProblemType.STORE_FAILED, f"{error}; nothing was published", retry_after_s=5) from error
            if self._traces is not None:
                self._traces.staged(number, headers, began=received.finished - received.receive_ms / 1000)
            try:
                update = self._distribute(blob, stored, received, verify_ms)
            except BaseException:
                self._forget(number)
                raise
            log.info(
                "weights_published",
                version=number,
                models=sorted(stored.models),
                digest=received.digest,
                bytes=blob.size_bytes,
                who=author,
            )
        finally:
            self._publishing.release()
        self._keep(number)
        return update, True

    def rollback(self, model: str, version: int, *, author: str) -> Update:
        """Publish a retained version again under a new version number; 404 if it is not retained."""
        stored = self.find(model, version)
        blob = WeightsBlob.joined(stored.buffers)
        kept = self.store.version(stored.version)
        blob.statistics = None if kept is None else kept.statistics
        received = Received(digest=stored.digest, finished=time.monotonic())
        update, _ = self.publish(blob, received, model=model, version=None, author=author, headers={})
        log.info("weights_rolled_back", model=model, version=version, as_version=update.version, who=author)
        return update

    def inherit(self) -> bool:
        """Publish the newest weights that workers cached under an earlier head, with their version, if they are newer
        than this head's. Returns whether there were any.
        """
        for worker, version in sorted(self._fleet.cached_versions().items(), key=lambda item: -item[1]):
            if version <= self.version:
                break
            try:
                kept = read_cached(self._fleet.fetch_cached(worker))
                with self._publishing:
                    if version <= self.version:
                        break
                    self._take_over(kept, author=f"cached by {worker}")
            except (CormorantError, ApiError, StoreError) as error:
                # The next worker may have the same version intact.
                log.warning("weights_not_inherited", version=version, worker=worker, reason=str(error))
                continue
            for offer, _ in kept:
                self._keep(offer.version)
            log.info("weights_inherited", version=version, worker=worker)
            return True
        return False

    def _take_over(self, kept: Sequence[tuple[Offer, memoryview]], *, author: str) -> None:
        """Store the publishes of an earlier head and publish the newest, or neither."""
        verified = []
        for offer, data in kept:
            blob = WeightsBlob.joined((data,))
            blob.check(default_model=offer.default_model, header=parse_body(blob.buffer))
            verify(blob.specs, self._fleet.specs)
            blob.statistics = offer.statistics
            verified.append(_stored(blob, digest_of([blob.buffer]), offer.version, author))
        # A number that this head has assigned belongs to other, newer bytes.
        new = [stored for stored in verified if self.store.version(stored.version) is None]
        try:
            for stored in new:
                self._put(stored)
            self.restore()
        except BaseException:
            for stored in new:
                self._forget(stored.version)
            raise

    def restore(self) -> None:
        """Publish the weights of an earlier head's store, with their version, before the fleet collects: the newest of
        each model in one, or, where groups of agents may play older ones, each version by itself.
        """
        stored = self.store.version(self.store.newest)
        if stored is None:
            return
        current: Mapping[str, StoredModel] = self.store.current()
        if self._fleet.job.spec.policy.agents is not None:
            current = stored.models
            for number in self.store.versions[:-1]:
                older = self.store.version(number)
                if older is not None and number > self._fleet.version:
                    self._fleet.publish(self._joined(older.models), version=number, allow_nonfinite=True)
        blob = self._joined(current)
        blob.statistics = stored.statistics
        if stored.statistics is not None and self._fleet.statistics is not None:
            self._fleet.statistics.inherit(stored.statistics)
        self._distribute(blob, stored, Received(digest=stored.digest, finished=time.monotonic()))
        log.info("weights_restored", version=stored.version, models=sorted(self.store.current()))

    def _joined(self, models: Mapping[str, StoredModel]) -> WeightsBlob:
        if len(models) == 1:
            # Publish the original bytes, so that the digest stays the same.
            ((model, stored),) = models.items()
            blob = WeightsBlob.joined(stored.buffers)
        else:
            model, blob = ALL_MODELS, joined(models)
        self._verify(blob, model)
        return blob

    def adopt(self, blob: WeightsBlob, version: int, *, author: str) -> None:
        """Store weights that the fleet received with a restored state."""
        with self._publishing:
            if version > self.store.newest:
                self._verify(blob, ALL_MODELS)
                self._put(_stored(blob, digest_of([blob.buffer]), version, author))
        self._keep(version)

    def find(self, model: str, version: int | None = None) -> StoredModel:
        """A model's bytes; 404 if they are not retained."""
        stored = self.store.model(model, version)
        if stored is not None:
            return stored
        history = self.store.history(model)
        if version is None or not history:
            raise ApiError(
                ProblemType.NO_WEIGHTS,
                f"nothing has been published for {model} yet; it still uses its initial weights, which "
                "`cormorant weights init MANIFEST FILE` writes",
            )
        raise ApiError(
            ProblemType.VERSION_EXPIRED,
            f"version {version} of {model} is not retained; retained are {', '.join(str(m.version) for m in history)}",
            oldest_retained=history[-1].version,
            current_version=history[0].version,
        )

    def _verify(self, blob: WeightsBlob, model: str) -> None:
        specs = self._fleet.specs
        header = parse_body(blob.buffer)
        # Unprefixed tensor names in a publish of several models.
        default = next(iter(specs)) if len(specs) == 1 else "policy"
        blob.check(default_model=model or default, header=header)
        verify(blob.specs, specs, only=model)

    def _put(self, stored: StoredVersion) -> StoredVersion:
        """Store a version; StoreError if the write fails or takes too long."""
        limit_s = self._limit_s(stored.size_bytes)
        writing: Future[StoredVersion] | None = None
        try:
            self._writer.submit(int).result(limit_s)  # behind a write that hangs, the bytes would stay in memory
            writing = self._writer.submit(self.store.write, stored)
            written = writing.result(limit_s)
        except TimeoutError:
            if writing is not None and not writing.cancel():
                # Runs in the writer's thread, before it writes this number again.
                writing.add_done_callback(lambda _: self.store.remove([stored.version]))
            raise StoreError(
                f"cannot store weights version {stored.version}: the disk did not answer within {limit_s:.0f} s"
            ) from None
        self.store.accept(written)
        return written

    def _forget(self, number: int) -> None:
        """Hide a version. The writer thread deletes its files before it stores anything else."""
        self.store.forget(number)
        self._writer.submit(self.store.remove, [number])

    def _limit_s(self, size_bytes: int) -> float:
        return self.within_s + size_bytes / _SLOWEST_BYTES_PER_S

    def _keep(self, number: int) -> None:
        """Make a version visible to the next head, flush it, and then delete those that it replaces. A failure becomes
        a warning of the update: the version remains valid, and the last durable ones stay.
        """
        stored = self.store.version(number)
        limit_s = self._limit_s(0 if stored is None else stored.size_bytes)
        try:
            self._flusher.submit(self.store.keep, number).result(limit_s)
        except (StoreError, TimeoutError) as error:
            log.exception("weights_not_durable", version=number)
            hung = f"could not keep weights version {number}: the disk did not answer within {limit_s:.0f} s"
            reason = hung if isinstance(error, TimeoutError) else str(error)
            self.tracker.warn(number, f"{reason}; the weights are in use, but the next head may not have them")
        finally:
            self._writer.submit(self.store.remove, self.store.prune(number))

    def _current_etag(self, model: str) -> str:
        if model:
            stored = self.store.model(model)
            return stored.etag if stored is not None else ""
        newest = self.store.version(self.store.newest)
        return make_etag(newest.version, newest.digest) if newest is not None else ""

    def _number(self, wanted: int | None, current: int) -> int:
        number = max(current, self.published_version) + 1 if wanted is None else wanted
        most = VERSION_MAX if wanted is None else HIGHEST_CHOSEN
        if not current < number <= most:
            raise ApiError(
                ProblemType.VERSION_CONFLICT,
                f"version {number} is not newer than {current} or is above the limit {most}; publish another one",
                current_version=current,
                current_etag=self._current_etag(ALL_MODELS),
            )
        return number

    def _distribute(
        self, blob: WeightsBlob, stored: StoredVersion, received: Received, verify_ms: float = 0.0
    ) -> Update:
        number = stored.version
        changes = {
            "bytes": blob.size_bytes,
            "state": "staged",
            "staged_at": datetime.now(UTC),
            "timings": UpdateTimings(receive_ms=received.receive_ms, verify_ms=verify_ms),
        }
        self.tracker.stage(_describe(stored).model_copy(update=changes), received=received.finished)
        began = time.monotonic()
        try:
            receipt = self._fleet.publish(blob, version=number, allow_nonfinite=True)  # checked earlier
        except CormorantError:
            self.tracker.withdraw(number)
            raise
        self._events.add("published", version=number, update_id=update_id(number))
        return self.tracker.hand_over(receipt, distribute_ms=(time.monotonic() - began) * 1000)


def _stored(blob: WeightsBlob, digest: str, number: int, author: str) -> StoredVersion:
    models = {}
    for name, tensors in blob.tensors.items():
        # A single model is stored as received, so its digest is the body's.
        is_body = len(blob.tensors) == 1
        buffers = (blob.buffer,) if is_body else cut(blob, tensors)
        models[name] = StoredModel(
            version=number,
            name=name,
            digest=digest if is_body else digest_of(buffers),
            buffers=buffers,
            num_tensors=len(tensors),
        )
    return StoredVersion(
        version=number,
        digest=digest,
        published_at=datetime.now(UTC),
        author=author,
        models=models,
        statistics=blob.statistics,
    )


def _describe(stored: StoredVersion) -> Update:
    """The update with which an earlier head published a version."""
    return Update(
        update_id=update_id(stored.version),
        model=min(stored.models),
        models=tuple(sorted(stored.models)),
        version=stored.version,
        digest=stored.digest,
        etag=make_etag(stored.version, stored.digest),
        bytes=stored.size_bytes,
        tensors=sum(model.num_tensors for model in stored.models.values()),
        state="superseded",
        workers=WorkerCounts(total=0, acked=0, failed=0),
        receipts=(),
        staged_at=stored.published_at,
        timings=UpdateTimings(),
    )


def check_preconditions(headers: Mapping[str, str], current_etag: str) -> None:
    """Refuse a change whose If-Match fails (412). `current_etag`: with quotes; empty if the resource does not exist."""
    if_match = headers.get("if-match")
    if if_match is None or matches(if_match, current_etag):
        return
    now = f"the current ETag is {current_etag}" if current_etag else "there is no version yet"
    detail = f"If-Match {if_match[:80]} does not match: {now}; fetch the current version and retry"
    raise ApiError(ProblemType.PRECONDITION_FAILED, detail, current_etag=current_etag or None)


def matches(header: str, etag: str) -> bool:
    """Whether an If-Match or If-None-Match names an ETag (with quotes; empty: there is nothing that could match)."""
    return bool(etag) and not {"*", etag}.isdisjoint(part.strip() for part in header.split(","))
