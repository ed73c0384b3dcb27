"""Whether anybody listens where the head should be, before `ray start` is paid for."""

import socket
import threading
from queue import Empty, SimpleQueue

_CONNECT_S = 2.0


def knock(address: tuple[str, int], *, limit_s: float) -> str:
    """Try to connect. Returns why that did not work; empty: somebody listens.

    A name server that does not answer holds its caller for minutes, and nothing can be done about it: that caller is a
    thread that is left behind.
    """
    answer: SimpleQueue[str] = SimpleQueue()

    def try_it() -> None:
        try:
            socket.create_connection(address, timeout=_CONNECT_S).close()
            answer.put("")
        except OSError as error:
            answer.put(str(error) or type(error).__name__)

    threading.Thread(target=try_it, name="door", daemon=True).start()
    try:
        return answer.get(timeout=limit_s)
    except Empty:
        return f"no answer within {limit_s:.0f} s"
