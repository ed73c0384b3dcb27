"""What wakes the fleet's thread out of its wait: rung by callers that have changed something."""

from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection


class Bell:
    """A pipe of which only the fleet's thread reads. `ring` may be called by any thread, and after `close`."""

    def __init__(self) -> None:
        self._read, self._write = Pipe(duplex=False)

    @property
    def source(self) -> Connection:
        """What to wait on: readable once somebody has rung."""
        return self._read

    def ring(self) -> None:
        """Have the thread look at once."""
        with suppress(OSError):  # closed: nobody looks any more
            self._write.send_bytes(b"x")

    def hush(self) -> None:
        """Forget who has rung so far. Called by the fleet's thread."""
        while self._read.poll():
            self._read.recv_bytes()

    def close(self) -> None:
        """Close both ends."""
        self._read.close()
        self._write.close()
