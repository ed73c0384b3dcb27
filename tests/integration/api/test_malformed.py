"""Requests that nobody would send on purpose, or may not send: never a 500, a half-applied version or a dead head;
which role each endpoint needs.
"""

import os
import pickle
import socket
from typing import Any

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from cormorant_api.app import make_app
from cormorant_contract.tensor_file import MalformedTensorFile, parse_header
from cormorant_testing.serving import SAFETENSORS, Api, Served, weights_file

PATHS = {
    ("read", "GET"): "status spaces workers workers/cpu-0/picture models models/policy/weights "
    "models/policy/versions updates/u1 pauses events live batches/next evaluation",
    ("read", "POST"): "batches/x-1/ack batches/x-1/release?delivery=1",
    ("write", "GET"): "state",
    ("write", "PUT"): "models/policy/weights weights state",
    ("write", "POST"): "models/policy:rollback pauses pause resume seed",
    ("write", "DELETE"): "pauses/p1",
    ("operator", "PUT"): "desired",
    ("operator", "POST"): "drain",
}
ROLES = [(method, f"/v1/{path}", role) for (role, method), paths in PATHS.items() for path in paths.split()]


def test_every_endpoint_is_in_the_table_of_roles(endless: Served) -> None:
    document = endless.anonymous.get("/openapi.json").json
    documented = [one for path in document["paths"].values() for one in path.values()]
    assert all(one["description"].replace("\n", " ").startswith(f"{one['summary']}.") for one in documented)
    found = {
        (method.upper(), path, operation.get("x-cormorant-role", ""))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    # HEAD is GET's; the paths of the table have their parameters filled in.
    assert len([entry for entry in found if entry[2] and entry[0] != "HEAD"]) == len(ROLES)
    assert {path for _, path, role in found if not role} == {"/livez", "/readyz", "/version", "/metrics"}


@pytest.mark.parametrize(("method", "path", "role"), ROLES)
def test_without_the_right_token_nothing_is_done(endless: Served, method: str, path: str, role: str) -> None:
    missing = endless.anonymous.call(method, path)
    assert (missing.status, missing.kind) == (401, "unauthenticated")
    assert missing.headers["www-authenticate"].startswith("Bearer")
    assert Api(endless.anonymous.port, "x" * 43).call(method, path).status == 401
    if role != "read":
        weaker = endless.reader if role == "write" else endless.writer
        refused = weaker.call(method, path)
        assert (refused.status, refused.kind, refused.json["role"]) == (403, "forbidden", role)


PATH = "/v1/models/policy/weights"
GOOD = weights_file(1)
REFUSED: list[tuple[str, str, Any, int, str, str]] = [
    ("GET", "/v1/nothing", None, 404, "not-found", "no such path: /v1/nothing"),
    ("GET", "/v1/models/nope/versions", None, 404, "unknown-model", "its models are policy"),
    ("GET", "/v1/updates/u999999", None, 404, "unknown-update", "ids look like u7"),
    ("GET", "/v1/workers/cpu-0/picture", None, 409, "no-picture", "Box("),
    ("GET", "/v1/batches/next?wait=nan", None, 422, "invalid-request", "less than or equal to 300"),
    ("DELETE", "/v1/status", None, 405, "method-not-allowed", "DELETE is not allowed at /v1/status; use GET"),
    ("DELETE", PATH, None, 405, "method-not-allowed", "use GET, HEAD, PUT"),
    ("POST", "/page/main.js", None, 405, "method-not-allowed", "use GET, HEAD"),
    ("POST", "/v1/seed", {}, 422, "invalid-request", "Field required"),
    ("POST", "/v1/seed", {"seed": -1}, 422, "invalid-request", "greater than or equal to 0"),
    ("POST", "/v1/seed", {"seed": 2**53}, 422, "invalid-request", "less than or equal to"),
    ("POST", "/v1/seed", {"seed": True}, 422, "invalid-request", "true is a boolean; send a number"),
    ("POST", "/v1/pauses", {"owner": ""}, 422, "invalid-request", "at least 1 character"),
    ("POST", "/v1/pauses", {"ttl_seconds": 0}, 422, "invalid-request", "greater than 0"),
    ("POST", "/v1/pauses", {"ttl_seconds": 1e9}, 422, "invalid-request", "less than or equal to 86400"),
    ("POST", "/v1/pauses", {"extra": 1}, 422, "invalid-request", "not permitted"),
    ("POST", "/v1/pauses", [], 422, "invalid-request", "body"),
    ("POST", "/v1/pauses", b'{"reason": "' + b"x" * 400_000, 413, "too-large", "longer than the limit"),
    ("POST", "/v1/pauses", b"[" * 100_000, 400, "malformed-request", "parsing the body"),
    ("POST", "/v1/pauses", b"{", 400, "malformed-request", "the body is not valid JSON"),
    ("PUT", PATH, b"short", 400, "malformed-safetensors", "5 bytes"),
    ("PUT", PATH, GOOD + b"\0", 400, "malformed-safetensors", "bytes"),
    ("PUT", PATH, pickle.dumps({"number": 1.0}), 415, "unsafe-format", "is a pickle"),
    ("PUT", PATH, b"PK\x03\x04" + bytes(400), 415, "unsafe-format", "is a pickle"),
    ("PUT", PATH, weights_file(1, bias=np.zeros(3, np.int32)), 422, "tensor-mismatch", "policy/bias"),
    ("PUT", PATH, bytes(8 << 20), 413, "too-large", "check that the weights are for this policy"),
    ("PUT", PATH, weights_file(np.nan), 422, "not-finite", "nothing was published"),
    ("PUT", PATH, weights_file(1, bias=np.array([0, np.inf, 0], np.float32)), 422, "not-finite", "policy/bias"),
    ("PUT", PATH, weights_file(1, **{"policy/bias": np.zeros(3, np.float32)}), 400, "malformed-safetensors", "twice"),
    ("PUT", f"{PATH}?version={2**52 + 1}", GOOD, 409, "version-conflict", f"is above the limit {2**52}"),
    ("PUT", f"{PATH}?version={2**63 - 1}", GOOD, 409, "version-conflict", f"is above the limit {2**52}"),
    ("PUT", "/v1/models/critic/weights", GOOD, 404, "unknown-model", "no model 'critic'"),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind", "words"), REFUSED, ids=[f"{row[1]}: {row[5]}" for row in REFUSED]
)
def test_what_cannot_be_meant_is_refused_and_changes_nothing(
    endless: Served, method: str, path: str, body: Any, status: int, kind: str, words: str
) -> None:
    before = endless.reader.get("/v1/models").json["version"]
    media = SAFETENSORS if method == "PUT" else "application/json"
    reply = endless.writer.call(method, path, body, Content_Type=media)
    assert (reply.status, reply.kind) == (status, kind), reply
    assert words in reply.json["detail"]
    assert status != 405 or reply.json["detail"].endswith(f"use {reply.headers['allow']}")
    assert endless.reader.get("/v1/models").json["version"] == before
    assert endless.reader.get("/v1/pauses").json["leases"] == []


EXAMPLES = int(os.environ.get("CORMORANT_EXAMPLES", "6"))
"""Of each operation. .ci/run asks for 40; every night, 400 are about ten thousand requests."""
FITS = {"number": ("F32", [], 4), "bias": ("F32", [3], 12)}


def fits(body: bytes) -> bool:
    try:
        tensors = parse_header(body).tensors
    except MalformedTensorFile:
        return False
    found = {name.removeprefix("policy/"): (t.dtype, list(t.shape), t.end - t.begin) for name, t in tensors.items()}
    is_ours = found == FITS and len(tensors) == len(found)
    return is_ours and bool(np.isfinite(np.frombuffer(body[-16:], np.float32)).all())


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(
    changes=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=3),
    size=st.integers(0, len(GOOD) + 1) | st.just(len(GOOD)),
)
@example(changes=[(len(GOOD) - 1, 0x7F)], size=len(GOOD))  # infinity
def test_changed_bytes_are_refused_or_are_data(endless: Served, changes: list[tuple[int, int]], size: int) -> None:
    body = bytearray(GOOD)
    for at, value in changes:
        body[at] = value
    body = (body + b"\0")[:size]
    before = endless.reader.get("/v1/models").json["version"]
    reply = endless.writer.put(PATH, bytes(body))
    assert reply.status in ((202,) if fits(body) else (400, 415, 422)), reply.body
    assert endless.reader.get("/v1/models").json["version"] == before + (reply.status == 202)


def test_what_is_cut_off_or_no_request_changes_nothing(endless: Served) -> None:
    before = endless.reader.get("/v1/models").json["version"]
    lines = [f"PUT {PATH} HTTP/1.1", "Host: x", f"Authorization: Bearer {endless.writer.token}"]
    publish = "\r\n".join([*lines, f"Content-Length: {len(GOOD)}", "", ""]).encode() + GOOD
    for request in (
        *(publish[: -len(GOOD) + size] for size in (4, 100, len(GOOD) - 1)),
        b"\x16\x03\x01" + bytes(200),
        b"GET / HTTP/9\r\n\r\n",
        b"POST /v1/pause HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", endless.writer.port), timeout=30) as connection:
            connection.sendall(request)
            assert request.startswith(b"PUT") or connection.recv(65536).startswith(b"HTTP/1.1 400")
    assert endless.reader.get("/v1/models").json["version"] == before


# -- everything that OpenAPI describes -------------------------------------------------------------------------

# Bodies of tensors are any bytes: the fuzzer above knows what is wrong with them.
schemathesis.serializer.alias(SAFETENSORS, "application/octet-stream")
# Left out: what would end the fleet that the other examples need, and what never ends.
schema = (
    schemathesis.openapi.from_dict(make_app().openapi())
    .exclude(operation_id=["drain", "stream_events", "stream_live", "put_desired"])
)  # fmt: skip


@pytest.mark.timeout(600)
@schema.parametrize()
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
def test_every_answer_is_a_documented_one(case: schemathesis.Case, endless: Served) -> None:
    case.headers = {**(case.headers or {}), "Authorization": f"Bearer {endless.operator.token}"}
    case.query = {name: value for name, value in (case.query or {}).items() if name != "wait"} | {"wait": "0"}
    if isinstance(case.body, dict) and "ttl_seconds" in case.body:
        case.body = case.body | {"ttl_seconds": 0.05}
    case.call_and_validate(
        base_url=f"http://127.0.0.1:{endless.operator.port}",
        checks=[not_a_server_error, status_code_conformance, content_type_conformance],
        timeout=60,
    )


def test_the_head_lives_after_all_that(endless: Served) -> None:
    assert endless.anonymous.get("/readyz").json["ready"]
    assert endless.status["restarts"] == 0
