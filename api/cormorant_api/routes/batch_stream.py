"""`GET /v1/batches`: a stream of batches on one connection."""

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cormorant_api.batches.ledger import Lent
from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http.transfer import Hangup, SlowReader, chunks_of, send_within
from cormorant_api.routes.lending import lend_next, oldest_wanted
from cormorant_contract.rest.headers import BATCH_STREAM
from cormorant_worker.errors import CormorantError
from cormorant_worker.fleet.wire import encode

_LOOK_S = 1.0
_LENGTH_BYTES = 8


class BatchStream(Response):
    """Length and bytes of each batch. With `acks`, a batch is acknowledged when the next one starts, and the last when
    the stream ends; otherwise the consumer acknowledges.
    """

    media_type = BATCH_STREAM

    def __init__(self, head: Head, *, consumer: str, acks: bool, max_staleness: int | None) -> None:
        super().__init__(None, headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._head, self._consumer, self._acks, self._max_staleness = head, consumer, acks, max_staleness
        self._last: Lent | None = None
        """Id of the batch that was sent and not acknowledged yet; used with `acks`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until everything is delivered, the consumer disconnects or the head closes."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        ledger = self._head.running.ledger
        async with Hangup(receive, notifier=ledger.notifier) as hangup:
            try:
                while not hangup.happened.is_set() and not self._head.is_closing:
                    if self._last is not None and ledger.is_only(self._last.id):
                        break
                    lent = await self._next(hangup)
                    if lent is not None:
                        await self._send(lent, scope, send)
                if not hangup.happened.is_set():
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    self._settle()
            except (ApiError, CormorantError):
                # The status is already sent, so the stream just ends; the next request gets the reason.
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                self._settle()
            except SlowReader:
                return
            finally:
                if self._last is not None:
                    ledger.release(self._last.id, self._last.delivery)

    async def _next(self, hangup: Hangup) -> Lent | None:
        oldest = oldest_wanted(self._head, self._max_staleness)
        return await lend_next(self._head, self._consumer, wait_s=_LOOK_S, oldest_version=oldest, hangup=hangup)

    async def _send(self, lent: Lent, scope: Scope, send: Send) -> None:
        ledger = self._head.running.ledger
        is_whole = False
        try:
            batch = await self._head.bulk(encode, lent.loan, batch_id=lent.id, delivery=lent.delivery)
            self._settle()
            length = batch.size_bytes.to_bytes(_LENGTH_BYTES, "little")
            for chunk in chunks_of([memoryview(length + batch.header), *batch.buffers]):
                await send_within(send, scope, chunk, timeout_s=self._head.settings.stall_timeout_s)
            await send_within(send, scope, b"", timeout_s=self._head.settings.stall_timeout_s)
            is_whole = True
            self._head.metrics.handed_over("stream", batch.size_bytes)
        finally:
            ledger.sent(lent.id)
            if not is_whole:
                ledger.release(lent.id, lent.delivery)
        if self._acks:
            self._last = lent

    def _settle(self) -> None:
        if self._last is not None:
            self._head.running.ledger.ack(self._last.id)
            self._last = None
