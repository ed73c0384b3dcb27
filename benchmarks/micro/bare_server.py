"""A server that does nothing but stream: what the head is compared with. Same server software, same settings."""

import json
import socket

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

CHUNK_BYTES = 1 << 20


async def get(request: Request) -> Response:
    size = request.path_params["size"]
    data = memoryview(np.ones(size, np.uint8))

    async def chunks():
        for start in range(0, size, CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]

    return StreamingResponse(chunks(), headers={"Content-Length": str(size)})


async def put(request: Request) -> Response:
    """Into one buffer of the right size, as a careful server would."""
    buffer = memoryview(np.empty(int(request.headers["content-length"]), np.uint8))
    at = 0
    async for chunk in request.stream():
        buffer[at : at + len(chunk)] = chunk
        at += len(chunk)
    return Response(status_code=204)


def main() -> None:
    app = Starlette(routes=[Route("/bytes/{size:int}", get), Route("/bytes", put, methods=["PUT"])])
    listener = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"event": "ready", "url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
    config = uvicorn.Config(app, http="httptools", loop="uvloop", log_level="error", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
