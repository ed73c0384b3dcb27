"""The client's transport against httpx2: the same bare server, small answers and 28 MB, in turn.

python -m benchmarks.client_transport
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import httpx2

from cormorant_client.transport import Broken, Transport, parse_address

PORT = 18765
SIZE = 28 * 1024 * 1024
SERVER = f"""
import uvicorn
BODY = memoryview(bytes({SIZE}))
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body = BODY if scope["path"] == "/large" else memoryview(b"{{}}")
    await send({{"type": "http.response.start", "status": 200,
                "headers": [(b"content-length", str(len(body)).encode())]}})
    for at in range(0, len(body), 1 << 20):
        await send({{"type": "http.response.body", "body": body[at:at + (1 << 20)], "more_body": True}})
    await send({{"type": "http.response.body", "body": b""}})
uvicorn.run(app, port={PORT}, log_level="error", lifespan="off")
"""


def median_s(call: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def main() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER])
    try:
        address = parse_address(f"http://127.0.0.1:{PORT}")
        ours, theirs = Transport(timeout_s=10), httpx2.Client(base_url=str(address))
        for _ in range(100):
            try:
                ours.request(address, "GET", "/small")
                break
            except Broken:
                time.sleep(0.1)
        for name, path, times in (("small", "/small", 300), ("28 MB", "/large", 15)):
            for _ in range(2):  # in turn, so that a busy moment is everybody's
                mine = median_s(lambda path=path: ours.request(address, "GET", path), times)
                other = median_s(lambda path=path: theirs.get(path).content, times)
                print(f"{name}: {mine * 1e3:6.2f} ms, httpx2 {other * 1e3:6.2f} ms, {other / mine:.1f} times as long")
        ours.close()
        theirs.close()
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
