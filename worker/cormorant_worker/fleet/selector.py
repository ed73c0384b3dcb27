"""What the fleet's thread waits for: its bell, and the sources of all links. Registered once, not at every turn.

bell ──────────────┐
sources of links ──┴─> select ──> who is ready ──> WorkerPool.listen, as many as there is time for
links without sources ──> note_news (any thread) ──┘
"""

import selectors
import time
from collections import deque

from cormorant_worker.fleet.transport import Source, WorkerConnection
from cormorant_worker.fleet.waker import Waker
from cormorant_worker.fleet.worker_handle import WorkerHandle
from cormorant_worker.fleet.worker_pool import WorkerPool

_READ, _BOTH = selectors.EVENT_READ, selectors.EVENT_READ | selectors.EVENT_WRITE
_LOOK = 16
"""Messages between two looks at the clock."""

Event = tuple[selectors.SelectorKey, int]


class ConnectionSelector:
    """Owned by the fleet's thread, except `note_news`."""

    def __init__(self, crew: WorkerPool, bell: Waker) -> None:
        self._crew, self._bell = crew, bell
        self._selector = selectors.DefaultSelector()
        self._selector.register(bell, _READ)
        self._members: dict[WorkerConnection, WorkerHandle] = {}
        """Links that are listened to. By identity."""
        self._ready: deque[Event] = deque()
        """Read at the last look, and not dealt with yet."""
        self._news: deque[WorkerConnection] = deque()
        self._writers: dict[Source, WorkerConnection] = {}
        """Sources that wait to be written."""

    def note_news(self, link: WorkerConnection) -> None:
        """A link without sources has news. Called by any thread."""
        self._news.append(link)
        self._bell.ring()

    def wait(self, timeout_s: float) -> list[Event]:
        """Wait until somebody is ready. Without the condition."""
        if self._ready:
            return []  # those that are left are dealt with first
        return self._selector.select(0.0 if self._news else timeout_s)

    def deal_with(self, ready: list[Event], *, until: float) -> bool:
        """Listen to who is ready, with the condition held. Returns whether some are left for the next turn."""
        self._ready.extend(found for found in ready if found[0].data is not None)
        heard = 0
        while self._ready or self._news:
            if self._ready:
                key, events = self._ready.popleft()
                member: WorkerHandle = key.data
                source: Source = key.fileobj  # type: ignore[assignment]  # what was registered
                if events & selectors.EVENT_WRITE and not member.is_gone:
                    member.link.flush(source)
                if events & _READ:
                    self._crew.listen(member, source)
            else:
                found = self._members.get(self._news.popleft())
                if found is not None:
                    self._crew.listen(found, None)
            heard += 1
            if not heard % _LOOK and time.monotonic() > until:
                break
        return bool(self._ready or self._news)

    def follow_crew(self) -> None:
        """Wait for those who joined, and no more for those who left; and for those to read who do not."""
        while self._crew.joined:
            member = self._crew.joined.popleft()
            if member.is_gone:
                continue
            self._members[member.link] = member
            for source in member.link.sources():
                self._selector.register(source, _READ, member)
            # What came before anybody listened.
            if not member.link.sources():
                self.note_news(member.link)
            if member.link.unsent():
                self._crew.stuck.append(member)
        while self._crew.parted:
            link, see_off = self._crew.parted.popleft()
            if self._members.pop(link, None) is not None:
                for source in link.sources():
                    self._writers.pop(source, None)
                    self._selector.unregister(source)
            see_off()  # from here on its descriptors may be closed
        self._follow_writers()

    def _follow_writers(self) -> None:
        for source, link in list(self._writers.items()):
            if source not in link.unsent():
                del self._writers[source]
                self._selector.modify(source, _READ, self._members[link])
        while self._crew.stuck:
            member = self._crew.stuck.popleft()
            if member.link in self._members:
                for source in member.link.unsent():
                    self._writers[source] = member.link
                    self._selector.modify(source, _BOTH, member)

    def close(self) -> None:
        """Wait for nobody. The bell and the sources are others' to close."""
        self._selector.close()
