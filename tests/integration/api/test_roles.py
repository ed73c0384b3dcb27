"""Which role each endpoint needs."""

import pytest

from cormorant_testing.serving import Api, Served

ROLES = [
    ("GET", "/v1/status", "read"),
    ("GET", "/v1/spaces", "read"),
    ("GET", "/v1/workers", "read"),
    ("GET", "/v1/models", "read"),
    ("GET", "/v1/models/policy", "read"),
    ("GET", "/v1/models/policy/weights", "read"),
    ("GET", "/v1/models/policy/versions", "read"),
    ("GET", "/v1/updates/u1", "read"),
    ("GET", "/v1/pauses", "read"),
    ("GET", "/v1/events?limit=1", "read"),
    ("GET", "/v1/live", "read"),
    ("GET", "/v1/workers/cpu-0/picture", "read"),
    ("GET", "/v1/state", "write"),
    ("GET", "/v1/batches/next", "read"),
    ("POST", "/v1/batches/x-1/ack", "read"),
    ("POST", "/v1/batches/x-1/release?delivery=1", "read"),
    ("PUT", "/v1/models/policy/weights", "write"),
    ("PUT", "/v1/weights", "write"),
    ("POST", "/v1/models/policy:rollback", "write"),
    ("POST", "/v1/pauses", "write"),
    ("DELETE", "/v1/pauses/p1", "write"),
    ("POST", "/v1/pause", "write"),
    ("POST", "/v1/resume", "write"),
    ("PUT", "/v1/state", "write"),
    ("GET", "/v1/evaluation", "read"),
    ("POST", "/v1/seed", "write"),
    ("PUT", "/v1/desired", "operator"),
    ("POST", "/v1/drain", "operator"),
]


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
