"""A head over a fleet, and the plainest of clients."""

import contextlib
import http.client
import json
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from cormorant_api.http.tokens import Role
from cormorant_api.server import HeadServer
from cormorant_api.settings import HeadSettings
from cormorant_client.head import parse_events
from cormorant_worker.fleet.options import FleetOptions

SAFETENSORS = "application/vnd.safetensors"


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def kind(self) -> str:
        """The last part of a problem's type."""
        assert self.headers["content-type"] == "application/problem+json", self
        return str(self.json["type"]).rpartition("/")[2]

    @property
    def batch(self) -> str:
        """The id of the batch."""
        return self.headers["cormorant-batch-id"]


@dataclass
class Api:
    """Speaks to one port, a connection for each request."""

    port: int
    token: str = ""

    def call(self, method: str, path: str, body: Any = None, *, timeout: float = 60, **headers: str) -> Reply:
        """Send bytes as they are, anything else as JSON."""
        if body is not None and not isinstance(body, bytes):
            body, headers = json.dumps(body).encode(), {"Content_Type": "application/json", **headers}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.token and "Authorization" not in sent:
            sent["Authorization"] = f"Bearer {self.token}"
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            data = response.read()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, data)
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.call("GET", path, **headers)

    def put(self, path: str, body: bytes | Mapping[str, Any], **headers: str) -> Reply:
        kind = {"Content_Type": SAFETENSORS} if isinstance(body, bytes) else {}
        return self.call("PUT", path, body, **kind | headers)

    def post(self, path: str, document: Mapping[str, Any] | None = None, **headers: str) -> Reply:
        return self.call("POST", path, document, **headers)

    def delete(self, path: str) -> Reply:
        return self.call("DELETE", path)

    def condition(self, kind: str) -> dict[str, str]:
        """A condition of the job, as its status has it."""
        return {found["type"]: found for found in self.get("/v1/status").json["conditions"]}[kind]

    @contextlib.contextmanager
    def listen(self, path: str, **headers: str) -> Iterator[Iterator[tuple[str, str, str]]]:
        """Kind, id and data of events, as they come."""
        sent = {"Authorization": f"Bearer {self.token}"} | {name.replace("_", "-"): headers[name] for name in headers}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=sent)
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            yield parse_events(response)

    def ack(self, batch: Reply) -> Reply:
        return self.post(f"/v1/batches/{batch.batch}/ack")

    def take(self, *, wait: float = 30, consumer: str = "anonymous") -> Reply:
        reply = self.get(f"/v1/batches/next?wait={wait}&consumer={consumer}")
        if reply.status == 200:
            self.ack(reply)
        return reply


class Served:
    """A running head in this process."""

    def __init__(self, server: HeadServer) -> None:
        self.server = server
        tokens = server.head.tokens.by_role
        port = int(server.url.rpartition(":")[2])
        self.operator = Api(port, tokens.get(Role.OPERATOR, ""))
        self.writer = Api(port, tokens.get(Role.WRITE, ""))
        self.reader = Api(port, tokens.get(Role.READ, ""))
        self.anonymous = Api(port)
        self.data = Api(server.head.data_port, tokens.get(Role.OPERATOR, ""))

    @property
    def fleet(self) -> Any:
        return self.server.fleet

    @property
    def status(self) -> Any:
        return self.reader.get("/v1/status").json


@contextlib.contextmanager
def serve(job: Any, *, directory: Path, workers: int = 1, **settings: Any) -> Iterator[Served]:
    """A head over a real fleet, on ports of its own."""
    chosen = HeadSettings(**{"port": 0, "directory": directory, "linger_s": 0.2, **settings})
    with HeadServer(job, chosen) as server:
        server.start_fleet(FleetOptions(workers=workers))
        yield Served(server)


def weights_file(version: float = 1.0, **changes: Any) -> bytes:
    """Weights of `policies:versioned`, whose actions begin with `version`."""
    arrays = {"number": np.array(version, np.float32), "bias": np.zeros(3, np.float32), **changes}
    return bytes(safetensors.numpy.save({name: array for name, array in arrays.items() if array is not None}))
