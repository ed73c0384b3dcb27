"""Which role each endpoint needs."""

import pytest

from cormorant_testing.serving import Api, Served

PATHS = {
    ("read", "GET"): "status spaces workers workers/cpu-0/picture models models/policy models/policy/weights "
    "models/policy/versions updates/u1 pauses events?limit=1 live batches/next evaluation",
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
