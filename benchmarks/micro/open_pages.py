"""Pages that watch a head, without browsers: fetches what a page is made of, then reads `/v1/live` and drops it.

Told by lines on stdin: `open NUMBER`, `hear`, `close`. Answers each with a line of JSON: what all pages have heard.
"""

import http.client
import json
import re
import selectors
import socket
import sys
import time

HEAR_S = 30.0
_FILE = re.compile(r"""["'](?:\./|page/)([\w-]+\.(?:js|css|svg))["']""")


class Pages:
    """Open pages of one head."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._heard: dict[socket.socket, int] = {}
        self.bytes = self.moments = 0

    def run(self) -> None:
        """Until stdin ends."""
        while line := self._next_line():
            command, *arguments = line.split()
            if command == "open":
                self._open(int(arguments[0]))
            elif command == "close":
                self._close()
            print(json.dumps({"moments": self.moments, "bytes": self.bytes}), flush=True)

    def _next_line(self) -> str:
        while True:
            if any(key.fileobj is sys.stdin for key in self._hear(None)):
                return sys.stdin.readline()

    def _hear(self, timeout_s: float | None) -> list[selectors.SelectorKey]:
        ready = [key for key, _ in self._selector.select(timeout_s)]
        for key in ready:
            if isinstance(key.fileobj, socket.socket):
                data = key.fileobj.recv(1 << 18)
                if not data:
                    raise SystemExit(f"the head closed a page's stream after {self.bytes} bytes")
                found = data.count(b"event: moment")
                self._heard[key.fileobj] += found
                self.moments += found
                self.bytes += len(data)
        return ready

    def _open(self, number: int) -> None:
        """Load them, and wait until each has heard a moment."""
        host, port = self._address
        for _ in range(number):
            self._load()
            page = socket.create_connection(self._address)
            page.sendall(f"GET /v1/live HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: text/event-stream\r\n\r\n".encode())
            self._heard[page] = 0
            self._selector.register(page, selectors.EVENT_READ)
            self._hear(0)
        deadline = time.monotonic() + HEAR_S
        while not all(self._heard.values()):
            if time.monotonic() > deadline:
                raise SystemExit(f"not every page heard a moment within {HEAR_S:.0f} s")
            self._hear(1.0)

    def _close(self) -> None:
        for page in self._heard:
            self._selector.unregister(page)
            page.close()
        self._heard.clear()

    def _load(self) -> None:
        """`/`, and the files that it names and that those name, over one connection."""
        connection = http.client.HTTPConnection(*self._address, timeout=HEAR_S)
        found, waiting = set(), ["/"]
        while waiting:
            path = waiting.pop()
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read().decode()
            if response.status != 200:
                raise SystemExit(f"{path}: {response.status} {text[:200]}")
            found.add(path)
            named = {f"/page/{name}" for name in _FILE.findall(text)}
            waiting.extend(named - found - set(waiting))
        connection.close()


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    Pages(host.rpartition("/")[2], int(port)).run()


if __name__ == "__main__":
    main()
