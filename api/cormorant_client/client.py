"""The learner's client of one head."""

import os
import secrets
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import index
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from cormorant_client import errors
from cormorant_client.batches import RemoteBatches, StreamOptions
from cormorant_client.delivery import Delivery
from cormorant_client.head import HeadConnection, default_owner, parse_events, quoted, read_events
from cormorant_client.publishing import MAIN_MODEL, Body, PulledWeights, Update, make_body
from cormorant_client.transport import Broken, Dial, HttpReply, Transport, dial_tcp, parse_address, read_token
from cormorant_contract.fleet import Fleet, Shard, State, Stats, read_state
from cormorant_contract.rest import base as headers
from cormorant_contract.rest import updates as rest
from cormorant_contract.rest.control import PauseLease, Pauses, Seeded
from cormorant_contract.rest.live import Event, Opening
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.rest.status import EvaluationTable, SpacesReport, Status, Workers
from cormorant_contract.rest.updates import Models, Versions
from cormorant_contract.weights import Publishable

if TYPE_CHECKING:
    from gymnasium import Space
    from tensordict import TensorDict

_STATE_WAIT_S = 300.0
_SEED_WAIT_S = 400.0
_CONFLICTS = 20
_RENEWALS = 3
"""Renewals of a pause per lease time: two may fail."""
_KEPT_STATISTICS = 256
"""Number of newest versions whose statistics are kept: as many as the head keeps."""

Document = Mapping[str, Any]


class ConnectOptions(TypedDict, total=False):
    """Keyword arguments of `connect`."""

    token: str | None
    token_file: str | os.PathLike[str] | None
    timeout_s: float
    reconnect_s: float
    ca_file: str | os.PathLike[str] | None
    ca_data: str | None
    server_name: str | None


def connect(
    url: str | None = None,
    *,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    timeout_s: float = 30.0,
    reconnect_s: float = 600.0,
    ca_file: str | os.PathLike[str] | None = None,
    ca_data: str | None = None,
    server_name: str | None = None,
    dial: Dial = dial_tcp,
) -> "Client":
    """Create a client for a head. Sends nothing yet.

    Args:
        url: `http://host:8000` (None: environment variable CORMORANT_URL).
        token: read, write or operator token (None: environment variable CORMORANT_TOKEN).
        token_file: token file of the head; its write token is used if no token is given (None: environment variable
            CORMORANT_TOKEN_FILE).
        timeout_s: seconds without data before a request is abandoned, in addition to any `wait` of the call.
        reconnect_s: how long requests that are safe to repeat are repeated while the head is away; the default outlasts
            a restart with back-off.
        ca_file: certificates to trust with https; None: those of the system.
        ca_data: the same as PEM text.
        server_name: host name in the certificate if it differs from the URL's, as behind a forwarded port.
        dial: opens connections to the head, for example through the Kubernetes API server; by default TCP.

    Raises:
        BadAddress: invalid URL, token or certificates.
    """
    if token and token_file:
        raise errors.BadAddress("token and token_file both give a token; pass only one of them")
    url = url or os.environ.get("CORMORANT_URL")
    if not (token or token_file):
        token, token_file = os.environ.get("CORMORANT_TOKEN") or None, os.environ.get("CORMORANT_TOKEN_FILE")
    if not url:
        raise errors.BadAddress("no head given; pass its URL or set CORMORANT_URL")
    if token_file and not token:
        token = read_token(token_file)
    if token and (not (token.isascii() and token.isprintable()) or " " in token):
        raise errors.BadAddress(
            "the token contains characters that are not allowed in tokens; check that it is "
            "the token and not the JSON file"
        )
    address = parse_address(url)
    context = None
    if address.is_tls:
        try:
            context = ssl.create_default_context(cafile=ca_file, cadata=ca_data)
        except (OSError, ssl.SSLError) as error:
            raise errors.BadAddress(f"cannot use the certificates in {ca_file}: {error}") from error
    transport = Transport(token=token or "", tls=context, server_name=server_name or "", timeout_s=timeout_s, dial=dial)
    # Other processes may have neither the environment variables nor the token file.
    again = partial(
        connect, url, token=token, timeout_s=timeout_s, reconnect_s=reconnect_s, ca_file=ca_file, ca_data=ca_data,
        server_name=server_name, dial=dial,
    )  # fmt: skip
    head = HeadConnection(address=address, transport=transport, reconnect_s=reconnect_s)
    return Client(head, again)


class Pause:
    """A pause lease of this client. As a context manager it is renewed until the block ends, then released.

        with client.pause(reason="evaluating"):
            evaluate()

    Without `with` it ends when it expires, or with `resume`.
    """

    def __init__(self, head: HeadConnection, *, owner: str, reason: str, ttl: float, wait: float) -> None:
        self._head = head
        self.owner = owner
        """Owner of the lease."""
        self._reason, self._ttl_s = reason, ttl
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.lease = self.renew(wait=wait)
        """The lease as the head last reported it."""

    def renew(self, *, wait: float = 0.0) -> PauseLease:
        """Restart the lease's time limit from now, and wait as long for every worker to stop."""
        request = {"owner": self.owner, "reason": self._reason, "ttl_seconds": self._ttl_s, "wait_seconds": wait}
        patience_s = None if self._thread is None else 0.0
        reply = self._head.post("/v1/pauses", request, wait_s=wait, patience_s=patience_s)
        self.lease = self._head.parse(PauseLease, reply)
        return self.lease

    def resume(self) -> None:
        """Release the lease; the fleet continues when no other lease is left. May be called twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with suppress(errors.NotFound):  # it had expired
            self._head.send("DELETE", f"/v1/pauses/{quoted(self.lease.id)}")

    def __enter__(self) -> "Pause":
        """Renew the lease until the block ends."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="cormorant-pause", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()

    def _keep(self) -> None:
        while not self._stop.wait(self._ttl_s / _RENEWALS):
            try:
                self.renew()
            except errors.ClientClosed:
                return
            except errors.ClientError:
                continue  # the next renewal may succeed; otherwise the lease expires


@dataclass(frozen=True, slots=True)
class RemoteShard(Shard):
    """One rank's part of a job's batches. Plain data, with the token: send it to the process that reads."""

    connect: "Callable[[], Client]" = field(repr=False)
    consumer: str
    """Name of this part in the head's status."""

    def iter_batches(self, *, copy: bool = False) -> "RemoteBatches[TensorDict]":
        """Connect from this process and iterate, as `Client.batches` does."""
        # No prefetch: a batch that one rank holds is missing in the others.
        return self.connect().batches(copy=copy, consumer=self.consumer, prefetch=0)


class Client(Fleet):
    """A fleet that runs elsewhere, behind a head. Thread-safe."""

    def __init__(self, head: HeadConnection, again: "partial[Client]") -> None:
        """`again`: picklable callable with which another process connects to the same head."""
        self._head = head
        self.again = again
        self._lock = threading.Lock()
        """Guards the version and the statistics."""
        self._version: int | None = None
        self._statistics: dict[int, Document] = {}
        self._stream: RemoteBatches[TensorDict] | None = None
        """Stream that `next_batch` reads."""
        self.on_close: Callable[[], None] = lambda: None
        """Closes what the connection uses, such as the client of the API server."""

    @property
    def url(self) -> str:
        """The head's address."""
        return str(self._head.address)

    @cached_property
    def spaces(self) -> "tuple[Space[Any], Space[Any]]":
        """See `Fleet.spaces`; needs gymnasium."""
        from cormorant_contract.spaces import space_from_json

        report = self._head.get(SpacesReport, "/v1/spaces")
        return space_from_json(report.observation), space_from_json(report.action)

    # -- weights -----------------------------------------------------------------------------------------------

    def publish(
        self,
        weights: Publishable,
        *,
        version: int | None = None,
        model: str = MAIN_MODEL,
        wait: float = 0.0,
        metadata: Mapping[str, str] | None = None,
    ) -> Update:
        """Publish weights. Every worker uses them from its next batch on.

        Sends the tensors from their own memory; you may change them after this returns. Retrying after a broken
        connection is safe because version and digest stay the same.

        Args:
            weights: a torch module, a state dict, a mapping of model names to either, or a safetensors file (bytes or
                path).
            version: number to publish, higher than the current one (None: the next number).
            model: model name, unless `weights` maps model names.
            wait: seconds to wait for the workers. Without it the head answers once it has checked the weights;
                `Update.wait` waits later.
            metadata: strings that belong to these weights, e.g. a learner's step counters: at most 1 MiB of JSON. They
                are stored in the same safetensors file; `weights().metadata` returns them.

        Raises:
            WeightsError: `weights` contains something that is not a tensor, or the file cannot be read.
            WeightsMismatch: names, shapes or dtypes differ from the policy's.
            NonfiniteWeights: a value is NaN or infinite, and `policy.allowNonfinite` is not set.
            StaleWeights: the version is not higher than the current one. Or the connection broke, and newer weights
                were published before it came back: whether a worker used these is unknown, and they are not sent again.
            UpdateFailed: with `wait`, no worker applied them.
            HeadUnreachable: the head was unreachable for longer than `reconnect_s`.
        """
        return self._publish(make_body(weights, model=model, metadata=metadata), version=version, wait=wait)

    def weights(self, model: str = MAIN_MODEL, *, version: int | None = None) -> PulledWeights:
        """Fetch weights.

        Args:
            model: name of the model.
            version: None: the newest.

        Raises:
            NotFound: unknown model, nothing published yet, or the version is no longer retained.
        """
        reply = self._head.send("GET", f"/v1/models/{quoted(model)}/weights", params={"version": version}, is_bulk=True)
        number = int(reply.headers.get(headers.POLICY_VERSION, "0"))
        return PulledWeights(model, number, reply.body)

    def models(self) -> Models:
        """List the models with their newest versions."""
        return self._head.get(Models, "/v1/models")

    def versions(self, model: str = MAIN_MODEL) -> Versions:
        """Retained versions, newest first."""
        return self._head.get(Versions, f"/v1/models/{quoted(model)}/versions")

    def rollback(self, version: int, *, model: str = MAIN_MODEL) -> Update:
        """Publish an old version again under a new number. Not retried when the connection breaks.

        Raises:
            NotFound: the version is not retained.
        """
        path = f"/v1/models/{quoted(model)}:rollback"
        return self._noted(self._head.post(path, {"version": version}, is_safe=False))

    @property
    def version(self) -> int:
        return self.models().version

    @property
    def statistics(self) -> Mapping[int, Document]:
        """Normalization statistics of each policy version in the batches so far; see `Fleet.statistics`."""
        with self._lock:
            return dict(self._statistics)

    # -- batches -----------------------------------------------------------------------------------------------

    def batches(self, *, copy: bool = False, **wanted: Unpack[StreamOptions]) -> "RemoteBatches[TensorDict]":
        """See `Fleet.batches`. Batches not acknowledged when the loop ends, or the process dies, are delivered again; a
        `with` block that ends without an error acknowledges its last batch. Iteration survives a restart of the head.
        Iterate once at a time: a second iteration, or `next_batch` within a loop, is another consumer, and waits for
        the batches that the first one has prefetched.

            with client.batches() as batches:
                for batch in batches:
                    learn(batch)

        Args:
            copy: as in `Fleet.batches`.
            wanted: frames, consumer, prefetch, max_staleness, memory; see `StreamOptions`.
        """
        self._end_stream()
        return RemoteBatches(self._head, wanted, partial(self._read, copy=copy))

    def next_batch(self, timeout: float | None = None, *, copy: bool = False) -> "TensorDict | None":
        """See `Fleet.next_batch`. Acknowledges the previous batch.

        Raises:
            BatchTimeout: no batch arrived in time.
            HeadUnreachable: the head was unreachable for longer than `reconnect_s`.
        """
        stream = self._stream = self._stream or RemoteBatches(self._head, {}, partial(self._read, copy=False))
        try:
            batch = stream.next(timeout)
        except errors.ClientError:
            # This stream ended with an error; the next call opens another one.
            stream.close()
            self._stream = None
            raise
        if batch is None and stream is not self._stream:  # another thread's call ended this stream, not the job
            return self.next_batch(timeout, copy=copy)
        return batch.clone() if copy and batch is not None else batch

    def streaming_split(self, n: int) -> tuple[RemoteShard, ...]:
        """See `Fleet.streaming_split`; learners may be in separate processes."""
        self._end_stream()
        return tuple(RemoteShard(self.again, f"{default_owner()}-{rank}") for rank in range(n))

    def deliveries(self, **wanted: Unpack[StreamOptions]) -> RemoteBatches[Delivery]:
        """Like `batches`, but yields deliveries: numpy arrays with the id and number of the delivery. Acknowledge each
        with `Delivery.ack`. Needs no torch.
        """
        self._end_stream()
        return RemoteBatches(self._head, wanted, lambda delivery: delivery)

    def _end_stream(self, *error: object) -> None:
        """Acknowledge the last batch of `next_batch` unless an error occurred, and release prefetched batches."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.__exit__(*(error or (None,)))

    def _read(self, delivery: Delivery, *, copy: bool) -> "TensorDict":
        if delivery.statistics:
            with self._lock:
                self._statistics |= delivery.statistics
                while len(self._statistics) > _KEPT_STATISTICS:
                    del self._statistics[min(self._statistics)]
        return delivery.tensordict(copy=copy)

    # -- control -----------------------------------------------------------------------------------------------

    def pause(self, *, owner: str | None = None, reason: str = "", ttl: float = 60.0, wait: float = 30.0) -> Pause:
        """Pause the fleet. Returns when it is paused.

            with client.pause(reason="evaluating"):
                evaluate()

        Args:
            owner: owner of the lease, one lease per owner (default: this process).
            reason: shown to others.
            ttl: seconds after which the lease expires. Inside `with` it is renewed.
            wait: seconds to wait for every worker to stop. 0: return at once; `Pause.lease.state` shows progress.

        Raises:
            ControlTimeout: a worker did not stop in time; the lease holds, and the others stay paused.
        """
        pause = Pause(self._head, owner=owner or default_owner(), reason=reason, ttl=ttl, wait=wait)
        if wait and pause.lease.state != "paused":
            raise errors.ControlTimeout(
                f"the fleet is still {pause.lease.state} after {wait:g} s; {pause.owner} holds its pause for {ttl:g} "
                "s: wait longer, or look at /v1/workers for the one that does not stop"
            )
        return pause

    def resume(self, owner: str | None = None) -> Pauses:
        """End the pause lease of an owner (default: this process). Leases of other owners stay."""
        return self._head.parse(Pauses, self._head.post("/v1/resume", {"owner": owner or default_owner()}))

    def pauses(self) -> Pauses:
        """The pause leases that are active, and the state of the fleet."""
        return self._head.get(Pauses, "/v1/pauses")

    def state(self) -> memoryview:
        return self._head.send("GET", "/v1/state", wait_s=_STATE_WAIT_S, is_bulk=True).body

    def restore(self, state: State) -> None:
        """See `Fleet.restore`. The fleet is paused during the restore. Batches that consumers hold, also those fetched
        ahead, are delivered nevertheless.

        Raises:
            StateError: the file cannot be read, or the state belongs to another job.
        """
        data = read_state(state)
        kind = {"Content-Type": headers.SAFETENSORS}
        owner = f"{default_owner()}/restore-{secrets.token_hex(4)}"  # other threads may restore, too
        try:
            with self.pause(owner=owner, reason="a state is restored", ttl=_STATE_WAIT_S):
                self._head.send("PUT", "/v1/state", headers=kind, body=[data], wait_s=_STATE_WAIT_S, is_bulk=True)
        except errors.ControlTimeout:
            self.resume(owner)  # the pause was granted, though a worker still steps
            raise
        except errors.Refused as error:
            raise error if isinstance(error, errors.StateError) else errors.StateError(str(error)) from error

    def seed(self, seed: int) -> tuple[str, ...]:
        """See `Fleet.seed`. Not retried when the connection breaks.

        Raises:
            HeadError: the seed is negative or above 2**53 - 1, or all frames are collected.
        """
        reply = self._head.post("/v1/seed", {"seed": index(seed)}, wait_s=_SEED_WAIT_S, is_safe=False)
        return self._head.parse(Seeded, reply).workers

    def status(self) -> Status:
        """Status of the job."""
        return self._head.get(Status, "/v1/status")

    def stats(self) -> Stats:
        status = self.status()
        return Stats(
            frames=status.frames.collected,
            total_frames=status.frames.target,
            stepped_frames=status.frames.stepped,
            dropped=status.frames.dropped,
            episodes=status.episodes.count,
            mean_return=status.episodes.mean_return,
            mean_length=status.episodes.mean_length,
            metric_means=status.episodes.metrics,
            version=status.weights.version,
            ready_workers=sum(group.ready for group in status.groups),
            desired_workers=sum(group.desired for group in status.groups),
            restarts=status.restarts,
            queued_batches=status.queue.waiting + status.queue.ready,
            is_paused=status.pause_state == "paused",
        )

    def evaluation(self) -> EvaluationTable:
        """Results recorded so far of a job with `collection.episodes`.

        Raises:
            NotFound: the job is not an evaluation.
        """
        return self._head.get(EvaluationTable, "/v1/evaluation")

    def workers(self) -> Workers:
        """Every worker."""
        return self._head.get(Workers, "/v1/workers")

    def events(self, *, last_id: str | None = None) -> Iterator[Event]:
        """Iterate over events indefinitely, as they happen. Reconnects after broken connections.

        Args:
            last_id: continue after this event; None: only new events.
        """
        return read_events(self._head, last_id=last_id)

    def opening(self) -> Opening:
        """History of the run and its current state, as on the live page."""
        try:
            with self._head.stream("/v1/live") as response:
                for kind, _, data in parse_events(response):
                    if kind == "opening":
                        return Opening.model_validate_json(data)
        except Broken as error:
            raise errors.HeadUnreachable(f"lost the connection to {self.url}: {error}") from error
        raise errors.HeadUnreachable(f"the head at {self.url} closed the stream; retry")

    def close(self) -> None:
        """Return the batch of `next_batch` that was not acknowledged, and close idle connections. Idempotent."""
        self._end_stream(errors.ClientError)
        self._head.close()
        self.on_close()

    def __exit__(self, *error: object) -> None:
        """Acknowledge the last batch of `next_batch` unless an error occurred, and close."""
        try:
            self._end_stream(*error)
        finally:
            self.close()

    def _publish(self, body: Body, *, version: int | None = None, wait: float = 0.0) -> Update:
        path = f"/v1/models/{quoted(body.model)}/weights" if body.model else "/v1/weights"
        kind = {"Content-Type": headers.SAFETENSORS, **({"Prefer": f"wait={wait:g}"} if wait else {})}
        attempts = _CONFLICTS
        while True:
            # Choosing the number here makes a repeated request harmless: the head recognizes it by version and digest.
            if version is None and self._version is None:
                self._note(self.models().version)
            number = (self._version or 0) + 1 if version is None else version
            try:
                reply = self._head.send(
                    "PUT", path, params={"version": number}, headers=kind, body=body.pieces, wait_s=wait, is_bulk=True
                )
            except errors.VersionTaken as error:
                current = error.problem.current_version
                self._note(current or 0)
                attempts -= 1
                if version is not None or current is None or not attempts:
                    raise
                if error.is_of_repetition:
                    # The head may have received these and newer ones since: a new number would bring old weights back.
                    detail = (
                        f"the connection broke while version {number} was published, and the head is at version "
                        f"{current} by now; whether version {number} acted is unknown: publish the newest weights"
                    )
                    raise errors.VersionTaken(error.problem.model_copy(update={"detail": detail})) from error
            except errors.HeadFailed as error:
                if error.kind == ProblemType.APPLY_TIMEOUT:
                    self._note(number)
                    raise errors.UpdateFailed(f"version {number} reached no worker in time: {error}") from error
                raise
            else:
                return self._noted(reply)

    def _noted(self, reply: HttpReply) -> Update:
        update = Update(self._head, self._head.parse(rest.Update, reply))
        self._note(update.version)
        return update

    def _note(self, version: int) -> None:
        with self._lock:
            self._version = max(version, self._version or 0)
