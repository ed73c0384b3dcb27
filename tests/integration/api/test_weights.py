"""Publishing over HTTP: what is taken, what is refused and how, and who acts with it."""

import os
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cormorant_api.errors import ApiError
from cormorant_api.http.bodies import UploadRoom
from cormorant_api.weights.store import WeightStore
from cormorant_cli import __main__ as command_line
from cormorant_testing.collecting import make_job
from cormorant_testing.scripts import until
from cormorant_testing.serving import Api, Served, serve, weights_file
from cormorant_worker.errors import FleetError

PATH = "/v1/models/policy/weights"


@pytest.fixture(autouse=True, scope="module")
def consumer(endless: Served) -> Iterator[None]:
    """Somebody takes batches all the time, so that workers reach their boundaries."""
    is_over = threading.Event()

    def take() -> None:
        while not is_over.is_set():
            endless.data.take(wait=0.2, consumer="drain")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(take)
        yield
        is_over.set()


def current(served: Served) -> int:
    return int(served.reader.get("/v1/models").json["version"])


def test_publish_is_applied_by_all_and_reads_back(endless: Served) -> None:
    before = current(endless)
    body = weights_file(before + 1)
    reply = endless.writer.put(PATH, body, Prefer="wait=60")
    update = reply.json
    assert (reply.status, update["state"], update["version"]) == (200, "applied", before + 1)
    assert [(r["worker"], r["state"]) for r in update["receipts"]] == [("cpu-0", "applied"), ("cpu-1", "applied")]
    assert all(receipt["latency_ms"] >= 0 for receipt in update["receipts"])
    assert (update["bytes"], update["tensors"]) == (len(body), 2)
    assert reply.headers["location"] == f"/v1/updates/u{before + 1}"
    assert endless.reader.get(reply.headers["location"]).json["state"] == "applied"

    found = endless.reader.get(PATH)
    assert found.body == body
    assert found.headers["etag"] == reply.headers["etag"] == f'"{before + 1}:{update["digest"]}"'
    assert found.headers["content-type"] == "application/vnd.safetensors"
    head = endless.reader.call("HEAD", PATH)
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(body)))
    assert endless.reader.get(PATH, If_None_Match=found.headers["etag"]).status == 304
    (model,) = endless.reader.get("/v1/models").json["models"]
    assert (model["name"], model["num_tensors"], model["etag"]) == ("policy", 2, found.headers["etag"])


def test_versions_only_grow_and_a_repetition_changes_nothing(endless: Served) -> None:
    before = current(endless)
    body = weights_file(5)
    first = endless.writer.put(f"{PATH}?version={before + 10}", body)
    assert first.status == 202
    again = endless.writer.put(f"{PATH}?version={before + 10}", body)
    assert (again.status, again.json["update_id"]) == (200, first.json["update_id"])
    other = endless.writer.put(f"{PATH}?version={before + 10}", weights_file(6))
    assert (other.status, other.kind, other.json["current_version"]) == (409, "version-conflict", before + 10)
    older = endless.writer.put(f"{PATH}?version={before + 9}", body)
    assert (older.status, older.kind) == (409, "version-conflict")
    assert endless.writer.put(PATH, body).json["version"] == before + 11


def test_conditions_are_checked_before_anything_changes(endless: Served) -> None:
    etag = endless.reader.call("HEAD", PATH).headers["etag"]
    before = current(endless)
    stale = endless.writer.put(PATH, weights_file(1), If_Match='"1:xxh3:00"')
    assert (stale.status, stale.kind, stale.json["current_etag"]) == (412, "precondition-failed", etag)
    assert current(endless) == before
    assert endless.writer.put(PATH, weights_file(1), If_Match=etag).json["version"] == before + 1


def test_an_old_version_comes_back_under_a_new_number(endless: Served) -> None:
    old = endless.writer.put(PATH, weights_file(41)).json["version"]
    endless.writer.put(PATH, weights_file(42))
    reply = endless.writer.post("/v1/models/policy:rollback", {"version": old})
    assert (reply.status, reply.json["version"]) == (202, old + 2)
    assert endless.reader.get(PATH).body == weights_file(41)
    versions = endless.reader.get("/v1/models/policy/versions").json["versions"]
    assert [entry["version"] for entry in versions][:3] == [old + 2, old + 1, old]
    assert versions[0]["digest"] == versions[2]["digest"]
    expired = endless.writer.post("/v1/models/policy:rollback", {"version": 999999})
    assert (expired.status, expired.kind) == (404, "version-expired")


GOOD = weights_file(1)


def test_publishes_that_a_hung_disk_holds_up_are_refused(endless: Served, monkeypatch: Any) -> None:
    before, thawed, publisher = current(endless), threading.Event(), endless.server.head.running.publisher
    write = publisher.store.write
    monkeypatch.setattr(publisher, "within_s", 1.0)
    monkeypatch.setattr(publisher.store, "write", lambda stored: thawed.wait(60) and write(stored))
    try:
        with ThreadPoolExecutor(4) as pool:
            refused = list(pool.map(lambda number: endless.writer.put(PATH, weights_file(number)), range(1000, 1004)))
    finally:
        thawed.set()
    assert [reply.status for reply in refused] == [503] * 4
    reasons = {reply.json["detail"] for reply in refused}
    silent = f"cannot store weights version {before + 1}: the disk did not answer within 1 s; nothing was published"
    late = "an earlier publish has not ended after 1 s; nothing was published; retry"
    assert silent in reasons
    assert reasons <= {silent, late}
    body = weights_file(before + 1)
    published = endless.writer.put(PATH, body, Prefer="wait=60")
    assert (published.status, published.json["version"]) == (200, before + 1)
    assert endless.reader.get(PATH).body == body
    versions = endless.reader.get("/v1/models/policy/versions").json["versions"]
    assert [entry["version"] for entry in versions if entry["version"] > before] == [before + 1]


def test_next_head_has_a_publish_only_if_it_was_accepted(endless: Served, tmp_path: Path, monkeypatch: Any) -> None:
    before, thawed, publisher = current(endless), threading.Event(), endless.server.head.running.publisher
    monkeypatch.setattr(publisher, "within_s", 1.0)
    rename = Path.rename

    def hang(path: Path, target: Path) -> Path:
        rename(path, target)
        thawed.wait(60)
        return target

    monkeypatch.setattr(Path, "rename", hang)
    try:
        published = endless.writer.put(PATH, weights_file(before + 1))
    finally:
        thawed.set()
    assert (published.status, published.json["version"]) == (202, before + 1)
    warning = "the disk did not answer within 1 s; the weights are in use, but the next head may not have them"
    assert published.json["warning"].endswith(warning)
    assert current(endless) == before + 1
    shutil.copytree(endless.server.head.settings.directory / "weights", tmp_path / "weights")
    assert WeightStore(tmp_path, keeps=5).newest == before + 1


def test_a_publish_that_acts_is_no_error_whatever_the_disk_says(endless: Served, monkeypatch: Any) -> None:
    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    before = current(endless)
    monkeypatch.setattr(os, "fsync", refuse)
    body = weights_file(before + 1)
    published = endless.writer.put(PATH, body, Prefer="wait=60")
    assert (published.status, published.json["version"], published.json["state"]) == (200, before + 1, "applied")
    assert "No space left on device" in published.json["warning"]
    again = endless.writer.put(f"{PATH}?version={before + 1}", body)
    assert (again.status, again.json["version"], current(endless)) == (200, before + 1, before + 1)
    for number in range(before + 2, before + 12):
        endless.writer.put(PATH, weights_file(number))
    assert len(endless.server.head.store.versions) <= 2 * endless.server.head.settings.keep_versions


def test_older_weights_are_deleted_once_newer_ones_are_used_and_kept(tmp_path: Path, monkeypatch: Any) -> None:
    def keep(number: int) -> None:
        publisher._writer.submit(lambda: None).result()
        found.append(sorted(path.name for path in (tmp_path / "weights").iterdir()))
        WeightStore.keep(publisher.store, number)

    def refuse(*_: object, **__: object) -> None:
        raise FleetError("no memory")

    found: list[list[str]] = []
    job = make_job(num_envs=1, policy="versioned", action="box")
    with serve(job, directory=tmp_path, keep_versions=1) as served:
        publisher = served.server.head.running.publisher
        monkeypatch.setattr(publisher.store, "keep", keep)
        for _ in range(2):
            assert served.writer.put(PATH, weights_file(1)).status == 202
        assert found == [["1.part"], ["1", "2.part"]]
        with monkeypatch.context() as broken:
            broken.setattr(served.fleet, "publish", refuse)
            assert served.writer.put(PATH, weights_file(2)).kind == "fleet-failed"
        assert served.reader.get(PATH).body == weights_file(1)
    assert WeightStore(tmp_path, keeps=1).versions == [2]


def test_a_publish_is_known_again_after_its_bytes_are_gone(endless: Served) -> None:
    before = current(endless)
    body = weights_file(before + 1)
    for _ in range(8):
        endless.writer.put(PATH, body)
    assert endless.server.head.store.version(before + 1) is None
    again = endless.writer.put(f"{PATH}?version={before + 1}", body)
    assert (again.status, again.json["version"], current(endless)) == (200, before + 1, before + 8)
    other = endless.writer.put(f"{PATH}?version={before + 1}", weights_file(3))
    assert (other.status, other.kind) == (409, "version-conflict")


def test_upload_memory_is_bounded_in_total() -> None:
    room = UploadRoom(100)
    with room.of(90):
        with pytest.raises(ApiError, match="uploads with 90 bytes in progress, limit 100; retry") as refused:
            room.of(11).__enter__()
        assert refused.value.status == 429
        with room.of(10):
            pass
    with room.of(200):
        pass  # a body that was allowed by itself always fits alone


def test_a_mismatch_lists_what_differs(endless: Served) -> None:
    body = weights_file(1, bias=np.zeros((2, 2), np.float32), number=None, **{"critic/w": np.zeros(1, np.float32)})
    problem = endless.writer.put(PATH, body).json
    assert problem["missing"] == {"count": 1, "names": ["policy/number"]}
    assert problem["unexpected"] == {"count": 1, "names": ["critic/w"]}
    assert problem["shape"] == {"count": 1, "names": ["policy/bias is [2, 2], not [3]"]}
    assert "dtype" not in problem


def test_body_without_length_or_type_is_refused_unread(endless: Served) -> None:
    raw = raw_request(endless.writer, f"PUT {PATH} HTTP/1.1", "Transfer-Encoding: chunked")
    assert b" 411 " in raw.splitlines()[0]
    assert endless.writer.put(PATH, GOOD, Content_Type="text/plain").kind == "unsupported-format"
    # Refused before the body is asked for: no "100 Continue" comes.
    expects = ("Expect: 100-continue", f"Content-Length: {len(GOOD)}")
    assert b" 401 " in raw_request(endless.anonymous, f"PUT {PATH} HTTP/1.1", *expects).splitlines()[0]
    assert b" 100 " in raw_request(endless.writer, f"PUT {PATH} HTTP/1.1", *expects).splitlines()[0]


def raw_request(api: Api, line: str, *headers: str) -> bytes:
    """Send a request by hand; the first bytes of the answer."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=30) as connection:
        lines = [line, "Host: x", f"Authorization: Bearer {api.token}", *headers, "", ""]
        connection.sendall("\r\n".join(lines).encode())
        return connection.recv(65536)


def test_concurrent_publishers_get_different_versions(endless: Served) -> None:
    before = current(endless)
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda number: endless.writer.put(PATH, weights_file(number)).json, [80, 81] * 10))
    assert sorted(reply["version"] for reply in replies) == list(range(before + 1, before + 21))
    last = max(replies, key=lambda reply: reply["version"])
    final = endless.reader.get(f"/v1/updates/{last['update_id']}?wait=60").json
    assert final["state"] == "applied"
    states = {endless.reader.get(f"/v1/updates/{reply['update_id']}").json["state"] for reply in replies}
    assert states <= {"applied", "superseded"}


def test_publish_to_a_paused_job_says_so_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its worker is within a batch: one that waits for room in the queue has new weights at once, paused or not."""
    file = tmp_path / "policy.safetensors"
    file.write_bytes(weights_file(1))
    batch = {"framesPerBatch": 100_000}
    job = make_job(num_envs=1, policy="versioned", action="box", step_s=0.001, collection=batch)
    with serve(job, directory=tmp_path / "head") as served:
        until(lambda: served.status["frames"]["stepped"] > 0)
        (tmp_path / "token").write_text(served.writer.token)
        assert served.writer.post("/v1/pauses", {"owner": "tests", "wait_seconds": 60}).json["state"] == "paused"
        options = ["--url", served.server.url, "--token-file", str(tmp_path / "token"), "--wait", "600"]
        for command, begins in (
            (["push", str(file)], "version 1: "),
            (["rollback", "1"], "version 2 has the weights of version 1: "),
        ):
            assert command_line.run(["weights", *command, *options]) == 0
            said = capsys.readouterr().out.splitlines()[-1]
            assert said.startswith(begins)
            assert said.endswith("; the job is paused and applies it after resuming")
