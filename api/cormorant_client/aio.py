"""The client for asyncio: the same calls, each in its own thread, so that none blocks the event loop.

Canceling a call returns at once. A request that a thread has begun still completes in the background, and before any
later publish.
"""

import _thread
import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, suppress
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack

from cormorant_client.batches import RemoteBatches, StreamOptions
from cormorant_client.client import Client, ConnectOptions, Pause, RemoteShard, connect
from cormorant_client.delivery import Delivery
from cormorant_client.errors import BatchTimeout, ClientClosed, ClientError
from cormorant_client.head import read_events
from cormorant_client.publishing import MAIN_MODEL, Update, make_body
from cormorant_contract.rest.live import Event
from cormorant_contract.weights import Publishable

if TYPE_CHECKING:
    from gymnasium import Space
    from tensordict import TensorDict

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_END_S = 2.0
"""Longest time to wait for an acknowledgement under way after an error."""


def _in_thread(
    method: Callable[Concatenate[Client, P], R], pool: str = "_pool"
) -> "Callable[Concatenate[AsyncClient, P], Awaitable[R]]":
    """Run the same method of `Client` in a thread."""

    async def call(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._call_in(getattr(self, pool), partial(method, self._client, *args, **kwargs))

    update_wrapper(call, method)
    return call


class AsyncClient:
    """One head, for asyncio. See `Client` for what each call does.

    async with AsyncClient("http://127.0.0.1:8000", token=token) as client:
        async for batch in client.batches():
            learn(batch)
            await client.publish(policy)
    """

    def __init__(self, url: str | Client | None = None, **options: Unpack[ConnectOptions]) -> None:
        """Connect; see `connect` for the options. `url` may be a `Client`, which closes with this one."""
        self._client: Client = url if isinstance(url, Client) else connect(url, **options)
        self._stream: AsyncBatches[TensorDict] | None = None
        """Stream that `next_batch` reads."""
        self._endings: list[Future[None]] = []
        """Each ends a stream that `next_batch` read before; those that ended well are dropped."""
        # Made as needed, and never too few: a `resume` must not wait for tasks that wait for batches.
        self._pool = ThreadPoolExecutor(max_workers=4096, thread_name_prefix="cormorant-async")
        # One thread: a canceled publish or restore must not act after a later publish.
        self._publishing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cormorant-publish")

    weights = _in_thread(Client.weights)
    models = _in_thread(Client.models)
    versions = _in_thread(Client.versions)
    resume = _in_thread(Client.resume)
    state = _in_thread(Client.state)
    restore = _in_thread(Client.restore, "_publishing")
    save = _in_thread(Client.save)
    stats = _in_thread(Client.stats)
    seed = _in_thread(Client.seed)
    status = _in_thread(Client.status)
    workers = _in_thread(Client.workers)
    pauses = _in_thread(Client.pauses)
    evaluation = _in_thread(Client.evaluation)
    opening = _in_thread(Client.opening)

    @property
    def url(self) -> str:
        return self._client.url

    async def spaces(self) -> "tuple[Space[Any], Space[Any]]":
        return await self._call(lambda: self._client.spaces)

    async def version(self) -> int:
        return await self._call(lambda: self._client.version)

    @property
    def statistics(self) -> Mapping[int, Mapping[str, Any]]:
        return self._client.statistics

    def streaming_split(self, n: int) -> tuple[RemoteShard, ...]:
        shards = self._client.streaming_split(n)
        self._end_stream()
        return shards

    async def publish(
        self,
        weights: Publishable,
        *,
        version: int | None = None,
        model: str = MAIN_MODEL,
        wait: float = 0.0,
        metadata: Mapping[str, str] | None = None,
    ) -> "AsyncUpdate":
        """Publish weights. Tensors are copied before the first await."""
        body = make_body(weights, model=model, metadata=metadata).copied()
        publish = partial(self._client._publish, body, version=version, wait=wait)
        return AsyncUpdate(await self._call_in(self._publishing, publish), self._call)

    async def rollback(self, version: int, *, model: str = MAIN_MODEL) -> "AsyncUpdate":
        """Publish an old version again, under a new number."""
        rollback = partial(self._client.rollback, version, model=model)
        return AsyncUpdate(await self._call_in(self._publishing, rollback), self._call)

    def batches(self, *, copy: bool = False, **wanted: Unpack[StreamOptions]) -> "AsyncBatches[TensorDict]":
        """Iterate over batches. Use `async with` around a loop that may end early: without it, the last batch is
        delivered again.
        """
        self._end_stream()
        return AsyncBatches(self._client.batches(copy=copy, **wanted), self._call)

    async def next_batch(self, timeout: float | None = None, *, copy: bool = False) -> "TensorDict | None":
        """See `Client.next_batch`. A canceled call loses nothing: the next call returns its batch."""
        stream = self._stream = self._stream or self.batches()
        try:
            async with asyncio.timeout(timeout):
                batch = await anext(stream)
        except StopAsyncIteration:
            # Another task's call may have ended this stream, not the job.
            return None if stream is self._stream else await self.next_batch(timeout, copy=copy)
        except TimeoutError:
            raise BatchTimeout(
                f"no batch came from {self._client.url} within {timeout:g} s; wait longer, or look at the job's status"
            ) from None
        except ClientError as error:
            if stream is self._stream and not stream._is_awaited:  # by another task, which keeps it
                self._stream = None
                await stream.__aexit__(type(error))
            raise
        return batch.clone() if copy else batch

    def deliveries(self, **wanted: Unpack[StreamOptions]) -> "AsyncBatches[Delivery]":
        """Iterate over deliveries: numpy arrays, acknowledged one by one."""
        self._end_stream()
        return AsyncBatches(self._client.deliveries(**wanted), self._call)

    @asynccontextmanager
    async def pause(
        self, *, owner: str | None = None, reason: str = "", ttl: float = 60.0, wait: float = 30.0
    ) -> AsyncIterator[Pause]:
        """Pause the fleet inside `async with`. Cancelling its entry or exit also releases the lease."""
        entering = self._submit(
            self._pool, lambda: self._client.pause(owner=owner, reason=reason, ttl=ttl, wait=wait).__enter__()
        )

        def give_back() -> None:
            if not entering.cancelled() and entering.exception() is None:
                entering.result().resume()

        try:
            yield await asyncio.wrap_future(entering)
        finally:
            ending = self._submit(self._pool, give_back)
            if entering.done():  # otherwise its request continues in the background
                await asyncio.shield(asyncio.wrap_future(ending))

    async def events(self, *, last_id: str | None = None) -> AsyncIterator[Event]:
        """Iterate over events indefinitely."""
        head = self._client._head.twin()
        events = read_events(head, last_id=last_id)
        try:
            while (event := await self._call(next, events, None)) is not None:
                yield event
        finally:
            head.close()

    async def close(self) -> None:
        """Return the unacknowledged batch of `next_batch`, and close. May be called twice."""
        await self.__aexit__(ClientError)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, kind: object, *rest: object) -> None:
        """Acknowledge the last batch of `next_batch` unless an error occurred, and close."""
        stream, self._stream = self._stream, None
        endings, self._endings = self._endings, []
        try:
            # After an error, or in `close`, it is not worth the patience with a head that is away.
            is_patient = kind is None
            await asyncio.to_thread(wait, endings, None if is_patient else _END_S)
            for ending in endings if is_patient else ():
                ending.result()
            if stream is not None:
                await stream.__aexit__(kind, *rest)
        finally:
            await asyncio.to_thread(self._client.close)
            self._pool.shutdown(wait=False)
            self._publishing.shutdown(wait=False)

    def _end_stream(self) -> None:
        """Acknowledge the last batch of `next_batch` and release prefetched ones, in a thread."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._endings = [one for one in self._endings if not one.done() or one.exception() is not None]
            self._endings.append(self._pool.submit(stream._end))

    async def _call(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._call_in(self._pool, partial(work, *args, **kwargs))

    async def _call_in(self, pool: ThreadPoolExecutor, work: Callable[[], R]) -> R:
        return await asyncio.wrap_future(self._submit(pool, work))

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[], R]) -> Future[R]:
        try:
            return pool.submit(work)
        except RuntimeError as error:  # the pool is shut down
            raise ClientClosed from error


class AsyncUpdate(Update):
    """Result of a publish. Properties reflect the head's last answer; `wait` and `refresh` ask again."""

    def __init__(self, update: Update, call: Callable[..., Any]) -> None:
        super().__init__(update._head, update.answer)
        self._call = call

    async def refresh(self, *, wait_s: float = 0.0) -> "AsyncUpdate":  # type: ignore[override]  # a coroutine
        """See `Update.refresh`."""
        await self._call(partial(super().refresh, wait_s=wait_s))
        return self

    async def wait(self, timeout: float = 30.0) -> "AsyncUpdate":  # type: ignore[override]  # a coroutine
        """Wait until every worker uses these weights or newer ones."""
        await self._call(super().wait, timeout)
        return self


class AsyncBatches(Generic[T]):
    """An asynchronous iterator; see `RemoteBatches`. One task at a time iterates.

    A canceled await loses nothing: the next await returns its batch.
    """

    def __init__(self, batches: RemoteBatches[T], call: Callable[..., Any]) -> None:
        self._batches = batches
        # Returning batches waits for the head; the garbage collector may run on the event loop.
        weakref.finalize(self, _thread.start_new_thread, batches.close, ()).atexit = False
        self._call = call
        self._asked: asyncio.Task[T | None] | None = None
        """Asks for the next batch; outlives the await that began it, until the caller has received the batch."""
        self._is_awaited = False

    @property
    def num_frames(self) -> int:
        return self._batches.num_frames

    async def close(self) -> None:
        """Return the last batch, and stop fetching. May be called twice."""
        await self.__aexit__(ClientError)

    def __aiter__(self) -> "AsyncBatches[T]":
        return self

    async def __anext__(self) -> T:
        """Acknowledge the last batch and wait for the next.

        Raises:
            ClientError: another task is already waiting on this iterator.
        """
        if self._is_awaited:
            await asyncio.sleep(0)  # it may have been canceled just now
        if self._is_awaited:
            raise ClientError("two tasks share one iterator; call client.batches() once per task")
        if self._asked is None:
            self._asked = asyncio.ensure_future(self._call(self._batches.next))
            # Reads the error: without a further call, asyncio would log that it was never retrieved.
            self._asked.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        self._is_awaited = True
        try:
            batch: T | None = await asyncio.shield(self._asked)
        except Exception:
            self._asked = None
            raise
        finally:
            self._is_awaited = False
        self._asked = None
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def __aenter__(self) -> "AsyncBatches[T]":
        return self

    async def __aexit__(self, kind: object, *rest: object) -> None:
        """Acknowledge the last batch unless an error occurred, and close. Releases a batch that was fetched but not
        returned.
        """
        # If this await is canceled before a thread is free, the stream still ends.
        await asyncio.shield(self._call(self._end, kind, *rest))
        if self._asked is not None:
            with suppress(Exception):  # it has ended; nobody awaits it any more
                await self._asked

    def _end(self, kind: object = None, *rest: object) -> None:
        if self._asked is None:
            self._batches.__exit__(kind, *rest)
        else:
            self._batches.close()
