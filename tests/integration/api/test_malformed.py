"""Requests that nobody would send on purpose: never a 500, never a half-applied version, never a dead head."""

import json
import string

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from cormorant_api.app import make_app
from cormorant_contract.tensor_file import ITEM_BYTES, MalformedTensorFile, parse_header
from cormorant_testing.serving import SAFETENSORS, Served, weights_file

PATH = "/v1/models/policy/weights"
GOOD = weights_file(1)
FITS = {"number": ("F32", [], 4), "bias": ("F32", [3], 12)}

# -- headers of safetensors ------------------------------------------------------------------------------------

names = st.sampled_from(["number", "bias", "policy/number", "critic/bias", "__metadata__", "", "../x", "é" * 40])
offsets = st.one_of(
    st.integers(-2, 40), st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 1.5, None, "0"])
)
dtypes = st.one_of(st.sampled_from([*ITEM_BYTES, "f32", "F31", ""]), st.none(), st.integers())
shapes = st.one_of(
    st.lists(st.one_of(st.integers(-1, 4), st.sampled_from([2**63, 10**300, 1.0, True])), max_size=4), st.none()
)
entries = st.one_of(
    st.fixed_dictionaries({"dtype": dtypes, "shape": shapes, "data_offsets": st.lists(offsets, max_size=3)}),
    st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), st.integers(), max_size=4),
    st.none(), st.integers(), st.text(string.printable, max_size=5),
)  # fmt: skip


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Files that are nearly right: each differs in its length, header or data."""
    pairs = draw(st.lists(st.tuples(names, entries), max_size=4))
    if draw(st.booleans()):  # begin with what fits, so that the rest is what is wrong
        at = 0
        for name, (dtype, shape, size) in FITS.items():
            pairs.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}))
            at += size
    # By hand: names may come twice.
    text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in pairs) + "}"
    if draw(st.integers(0, 4)) == 0:
        text = text[: draw(st.integers(0, len(text)))] + draw(st.sampled_from(["", "}", "\0", "[" * 3000, "NaN"]))
    header = text.encode("utf-8", "surrogatepass")
    claimed = draw(st.sampled_from([0, 1, -1, 2**20, 2**63, 2**64 - 1]))
    length = (len(header) + claimed) % 2**64 if abs(claimed) < 2**62 else claimed
    return length.to_bytes(8, "little") + header + bytes(draw(st.sampled_from([0, 4, 16, 17, 100])))


def fits(body: bytes) -> bool:
    try:
        tensors = parse_header(body).tensors
    except MalformedTensorFile:
        return False
    found = {name.removeprefix("policy/"): (t.dtype, list(t.shape), t.end - t.begin) for name, t in tensors.items()}
    is_ours = found == FITS and len(tensors) == len(found)
    return is_ours and bool(np.isfinite(np.frombuffer(body[-16:], np.float32)).all())


def check_file(served: Served, body: bytes) -> None:
    before = served.reader.get("/v1/models").json["version"]
    reply = served.writer.put(PATH, body)
    after = served.reader.get("/v1/models").json["version"]
    if fits(body):
        assert (reply.status, after) == (202, before + 1), reply.body
    else:
        assert 400 <= reply.status < 500, reply.body
        assert reply.json["type"].startswith("https://cormorant.dev/problems/")
        assert after == before


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(body=files())
def test_headers_of_safetensors(endless: Served, body: bytes) -> None:
    check_file(endless, body)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=10_000, suppress_health_check=list(HealthCheck))
@given(body=files())
def test_ten_thousand_headers_of_safetensors(endless: Served, body: bytes) -> None:
    check_file(endless, body)


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(at=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255))
@example(at=len(GOOD) - 1, value=0x7F)  # infinity
def test_a_changed_byte_anywhere_is_refused_or_is_data(endless: Served, at: int, value: int) -> None:
    body = GOOD[:at] + bytes([value]) + GOOD[at + 1 :]
    reply = endless.writer.put(PATH, body)
    assert reply.status in (202, 400, 415, 422)
    assert (reply.status == 202) == fits(body)


def test_allowed_nonfinite_weights_come_back_as_sent(endless: Served) -> None:
    body = weights_file(0, bias=np.full(3, np.nan, np.float32))
    assert endless.writer.put(PATH + "?allow_nonfinite=true", body).status == 202
    assert endless.reader.get(PATH).body == body
    assert endless.writer.put(PATH, GOOD).status == 202


# -- everything that OpenAPI describes -------------------------------------------------------------------------

# Bodies of tensors are any bytes: the fuzzer above knows what is wrong with them.
schemathesis.serializer.alias(SAFETENSORS, "application/octet-stream")
# Left out: what would end the fleet that the other examples need, and what never ends.
schema = (
    schemathesis.openapi.from_dict(make_app().openapi())
    .exclude(operation_id=["drain", "stream_events", "stream_live", "put_desired"])
)  # fmt: skip
OPERATIONS = sum(1 for _ in schema.get_all_operations())


def check_case(served: Served, case: schemathesis.Case) -> None:
    case.headers = {**(case.headers or {}), "Authorization": f"Bearer {served.operator.token}"}
    case.query = {name: value for name, value in (case.query or {}).items() if name != "wait"} | {"wait": "0"}
    if isinstance(case.body, dict):
        case.body = case.body | {"ttl_seconds": 0.05} if "ttl_seconds" in case.body else case.body
    case.call_and_validate(
        base_url=f"http://127.0.0.1:{served.operator.port}",
        checks=[not_a_server_error, status_code_conformance, content_type_conformance],
        timeout=60,
    )


@schema.parametrize()
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
def test_every_answer_is_a_documented_one(case: schemathesis.Case, endless: Served) -> None:
    check_case(endless, case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@schema.parametrize()
@settings(max_examples=-(-10_000 // OPERATIONS), suppress_health_check=list(HealthCheck))
def test_ten_thousand_requests(case: schemathesis.Case, endless: Served) -> None:
    check_case(endless, case)


def test_the_head_lives_after_all_that(endless: Served) -> None:
    assert endless.anonymous.get("/readyz").json["ready"]
    assert endless.reader.get("/v1/status").json["restarts"] == 0
