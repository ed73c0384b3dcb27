"""Annotations over HTTP, and the pair of weights and annotation after a learner or a head was killed."""

import asyncio
import threading
from pathlib import Path

import pytest

from cormorant_client import AsyncClient, Client, Conflict, Forbidden, HeadFailed, NotFound, Refused, connect
from cormorant_testing.collecting import make_job
from cormorant_testing.policies import numbered
from cormorant_testing.scripts import until
from cormorant_testing.serving import Served, serve

PATH = "/v1/annotations/learner"
OCTETS = {"Content_Type": "application/octet-stream"}


def client_of(served: Served) -> Client:
    return connect(served.server.url, token=served.writer.token, reconnect_s=0)


def test_a_value_is_read_back_with_its_version_and_etag(endless: Served) -> None:
    stored = endless.writer.put(f"{PATH}?version=0", b"\x00steps\n1", **OCTETS)
    entry = stored.json
    assert (stored.status, entry["key"], entry["version"], entry["bytes"]) == (200, "learner", 0, 8)
    assert entry["author"] == "write@127.0.0.1"
    assert stored.headers["etag"] == entry["etag"] == f'"0:{entry["digest"]}"'
    found = endless.reader.get(PATH)
    assert (found.status, found.body) == (200, b"\x00steps\n1")
    assert found.headers["etag"] == entry["etag"]
    assert found.headers["cormorant-policy-version"] == "0"
    assert endless.reader.get(PATH, If_None_Match=entry["etag"]).status == 304
    assert endless.reader.get("/v1/annotations").json == {"annotations": [entry], "keeps": 6}
    assert endless.reader.put(PATH, b"", **OCTETS).status == 403
    assert endless.writer.call("DELETE", PATH, If_Match='"9:other"').status == 412
    assert endless.writer.call("DELETE", PATH).status == 204
    missing = endless.reader.get(PATH)
    assert (missing.status, missing.json["type"]) == (404, "https://cormorant.dev/problems/unknown-annotation")
    assert missing.json["detail"] == "there is no annotation learner; known are none"
    assert endless.writer.call("DELETE", PATH).status == 404


def test_bad_requests_get_a_sentence_and_change_nothing(endless: Served) -> None:
    long = endless.writer.put(PATH, b"x" * ((1 << 20) + 1), **OCTETS)
    assert (long.status, long.json["limit_bytes"]) == (413, 1 << 20)
    assert long.json["detail"] == (
        "the value has 1,048,577 bytes, the limit of an annotation is 1,048,576; store the data elsewhere and its "
        "location here"
    )
    assert endless.writer.put("/v1/annotations/a%2Fb", b"", **OCTETS).status == 404
    odd = endless.writer.put("/v1/annotations/.hidden", b"", **OCTETS)
    assert (odd.status, odd.json["errors"][0]["field"]) == (422, "path.key")
    assert endless.writer.put(f"{PATH}?version=-1", b"", **OCTETS).status == 422
    assert endless.writer.put(PATH, b"", If_Match='"0:none"', **OCTETS).json["detail"] == (
        'If-Match "0:none" does not match: there is no version yet; fetch the current version and retry'
    )
    assert endless.reader.get("/v1/annotations").json["annotations"] == []


def test_annotations_on_a_disk_that_hangs_hold_up_nothing_else(
    endless: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = endless.server.head
    monkeypatch.setattr(head.disk_writes, "within_s", 1.0)
    refused: list[str] = []

    def put(number: int) -> None:
        reply = endless.writer.put(f"/v1/annotations/k{number}", b"1", **OCTETS)
        assert (reply.status, reply.kind, reply.headers["retry-after"]) == (503, "store-failed", "5")
        refused.append(reply.json["detail"])

    with head.annotations._writing:  # as long as it is held here, nothing is written
        puts = [threading.Thread(target=put, args=(number,)) for number in range(24)]
        for started in puts:
            started.start()
        batch = endless.data.call("GET", "/v1/batches/next?wait=30&ack=auto", timeout=30)
        assert batch.status == 200, "there is a thread left to encode it"
        for started in puts:
            started.join(30)
    running = [reason for reason in refused if "may still be changed" in reason]
    full = [reason for reason in refused if reason.startswith("16 writes already wait for the disk; annotation k")]
    assert (len(refused), len(running)) == (24, 1)
    assert len(full) >= 24 - 17
    assert running[0].startswith("the disk did not answer within 1 s; annotation k")
    until(lambda: endless.writer.put(PATH, b"2", **OCTETS).status == 200)
    for entry in endless.reader.get("/v1/annotations").json["annotations"]:
        endless.writer.delete(f"/v1/annotations/{entry['key']}")


def test_the_client_keeps_values_beside_versions(endless: Served) -> None:
    with client_of(endless) as client:
        assert client.annotations.get("learner") is None
        first = client.publish(numbered(1), annotations={"learner": b"after 1", "other": b""})
        second = client.publish(numbered(2), annotations={"learner": b"after 2"})
        # A learner that dies here has stored the value of weights that it never published.
        client.annotations.put("learner", b"never published", version=second.version + 1)
        newest = client.weights()
        state = client.annotations.get("learner", version=newest.version)
        assert state is not None
        assert (state.version, state.value) == (newest.version, b"after 2")
        before = client.annotations.get("learner", version=first.version)
        assert before is not None
        assert before.value == b"after 1"
        assert [(a.key, a.version) for a in client.annotations.list()] == [
            ("learner", second.version + 1),
            ("other", first.version),
        ]
        with pytest.raises(Conflict, match="does not match: the current ETag is"):
            client.annotations.put("learner", b"", if_match=state.etag)
        pending = client.annotations.get("learner")
        assert pending is not None
        stored = client.annotations.put("learner", b"now", version=second.version + 1, if_match=pending.etag)
        assert stored.version == second.version + 1
        with pytest.raises(Refused, match="the value has 1,048,577 bytes"):
            client.annotations.put("learner", bytes((1 << 20) + 1))
        with connect(endless.server.url, token=endless.reader.token) as reader, pytest.raises(Forbidden):
            reader.annotations.put("learner", b"")
        client.annotations.delete("learner")
        client.annotations.delete("other")
        with pytest.raises(NotFound, match="there is no annotation learner; known are none"):
            client.annotations.delete("learner")


def test_the_client_for_asyncio_does_the_same(endless: Served) -> None:
    async def use() -> None:
        async with AsyncClient(endless.server.url, token=endless.writer.token) as client:
            update = await client.publish(numbered(3), annotations={"learner": b"async"})
            found = await client.annotations.get("learner", version=update.version)
            assert found is not None
            assert (found.value, found.version) == (b"async", update.version)
            await client.annotations.put("learner", b"again", if_match=found.etag)
            assert [entry.bytes for entry in await client.annotations.list()] == [5]
            await client.annotations.delete("learner")

    asyncio.run(use())


def test_the_next_head_has_the_weights_and_their_annotation(tmp_path: Path) -> None:
    job = make_job(num_envs=1, policy="versioned", action="box", collection={"framesPerBatch": 30})
    with serve(job, directory=tmp_path) as served, client_of(served) as client:
        version = client.publish(numbered(1), annotations={"learner": b"1"}).version
        client.annotations.put("learner", b"2", version=version + 1)
    with serve(job, directory=tmp_path) as served, client_of(served) as client:
        weights = client.weights()
        state = client.annotations.get("learner", version=weights.version)
        assert state is not None
        assert (weights.version, state.version, state.value) == (version, version, b"1")
        newest = client.annotations.get("learner")
        assert newest is not None
        assert newest.value == b"2"
        (tmp_path / "annotations").rename(tmp_path / "elsewhere")
        (tmp_path / "annotations").touch()
        with pytest.raises(HeadFailed, match=r"cannot store annotation learner in .*; free space on the head's volume"):
            client.annotations.put("learner", b"3")
