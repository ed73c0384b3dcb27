"""The client against a real head over a real fleet of counting environments."""

import asyncio
import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cormorant import Fleet
from cormorant_cli import __main__ as entry
from cormorant_client import AsyncClient, BatchGone, Client, LearnerLink, RemoteBatches, Unauthenticated, connect
from cormorant_client.aio import AsyncBatches
from cormorant_contract.errors import ControlTimeout, FleetClosed
from cormorant_testing.collecting import make_checker, make_job
from cormorant_testing.info import INFO, METRICS, assert_info
from cormorant_testing.policies import numbered
from cormorant_testing.scripts import until
from cormorant_testing.serving import Served, serve

OPTIONS = {"lengths": (3, 1, 7), "ends": "alternate"}
pytestmark = pytest.mark.anyio
NUM_ENVS = 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    job = make_job(
        num_envs=NUM_ENVS, policy="versioned", action="box", info=INFO,
        collection={"framesPerBatch": 30, "episodeMetrics": list(METRICS)},
        queue={"capacityBatches": 4}, step_s=0.001, **OPTIONS,
    )  # fmt: skip
    with serve(job, directory=tmp_path_factory.mktemp("head"), workers=1) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with connect(served.server.url, token=served.writer.token, reconnect_s=10) as made:
        yield made


def until_nothing_is_lent(client: Client) -> None:
    # Not at once: the head may be encoding a batch for a fetch that has just ended.
    until(lambda: client.status().queue.lent == 0, seconds=20)


def checker() -> Any:
    return make_checker(NUM_ENVS, action="box", gaps=True, acts_by_version=True, **OPTIONS)


@pytest.mark.parametrize("memory", ["auto", "never"])
def test_every_value_arrives(client: Client, memory: Any) -> None:
    judge, seen = checker(), {}
    with client.deliveries(frames=150, memory=memory) as batches:
        for batch in batches:
            assert batch.is_shared == (memory == "auto")
            assert judge.take(batch.tensordict()) == batch.num_frames == 30
            assert batch.delivery == 1
            seen[batch.id] = batch
    assert len(seen) == judge.batches == 5
    assert batches.num_frames == 150
    if memory == "auto":
        with pytest.raises(BatchGone, match="copy=True"):
            next(iter(seen.values())).numpy()


def test_info_and_episode_metrics_reach_a_learner(client: Client, served: Served) -> None:
    with client.deliveries(frames=300) as batches:
        for batch in batches:
            assert_info(batch.tensordict())
    until(lambda: client.status().episodes.count >= 100)
    found = client.status().episodes.metrics
    assert list(found) == [metric["name"] for metric in METRICS]
    assert 1 <= found["mean_step"] <= found["longest"] <= 7  # type: ignore[operator]  # none is None
    assert 0 < found["any_even"] < 1  # type: ignore[operator]
    line = b'cormorant_episode_metric{collectorjob="counting",name="steps",task=""}'
    until(lambda: line in served.anonymous.get("/metrics").body)


def test_a_late_reader_of_shared_memory_sees_what_it_was_given(tmp_path: Path) -> None:
    job = make_job(
        num_envs=NUM_ENVS, policy="versioned", action="box", collection={"framesPerBatch": 30},
        queue={"capacityBatches": 2}, **OPTIONS,
    )  # fmt: skip
    with (
        serve(job, directory=tmp_path, workers=1, ack_within_s=0.5) as served,
        connect(served.server.url, token=served.writer.token) as client,
        client.deliveries(prefetch=0) as slow,
    ):
        seen = next(slow)
        kept = seen.tensordict(copy=True)
        until(lambda: client.status().queue.ready == 1)
        with client.deliveries(frames=600, prefetch=0) as others:
            delivered = [(batch.id, batch.delivery) for batch in others]
        assert delivered[0] == (seen.id, 2), "a batch that is not acknowledged in time goes to others"
        assert (seen.tensordict() == kept).all(), "nobody writes where a reader still looks"


def test_what_was_not_acknowledged_comes_again(client: Client) -> None:
    lost = ""
    with suppress(RuntimeError), client.deliveries(prefetch=0) as batches:
        lost = next(batches).id
        raise RuntimeError("the learner failed")
    with client.deliveries(prefetch=0) as batches:
        again = next(batches)
        assert (again.id, again.delivery) == (lost, 2)
    with client.deliveries(prefetch=-1) as batches:  # as 0
        assert next(batches).id != lost


def test_a_loop_that_is_left_gives_back_what_it_had(client: Client, served: Served) -> None:
    for _ in client.deliveries(consumer="leaver"):
        break
    threads = [thread.name for thread in threading.enumerate() if thread.name == "cormorant-batches"]
    assert threads == []
    # What was under way to the loop comes back when the head sees its connection end.
    until(lambda: [found.lent for found in client.status().consumers if found.name == "leaver"] == [0])


@pytest.mark.parametrize(
    ("token", "words"), [("wrong", "invalid token"), (None, r"from Python with connect\(url, token_file=")]
)
def test_a_wrong_token_is_told(served: Served, token: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORMORANT_TOKEN", raising=False)
    with connect(served.server.url, token=token) as stranger:
        with pytest.raises(Unauthenticated, match=words):
            stranger.status()
        for _ in range(2):
            with pytest.raises(Unauthenticated):
                stranger.next_batch(timeout=30)


def test_pause_stops_steps_is_renewed_and_ends(client: Client) -> None:
    with client.pause(owner="me", reason="to look", ttl=1.0) as pause:
        assert pause.lease.state == "paused"
        first = pause.lease.expires_at
        while pause.lease.expires_at == first:  # renewed by its thread, or the test times out
            threading.Event().wait(0.05)
        assert [lease.owner for lease in client.pauses().leases] == ["me"]
    assert client.pauses().leases == ()
    client.pause(owner="you", ttl=60)
    assert client.resume("you").leases == ()


def test_a_fleet_is_paused_while_a_state_is_restored_and_stays_so_for_others(client: Client, tmp_path: Path) -> None:
    with client.pause():
        client.save(tmp_path / "state")
        client.restore(client.state())
        assert client.stats().is_paused, "by the lease of the caller"
    client.restore(tmp_path / "state")
    assert client.pauses().leases == ()


def test_a_restore_in_vain_leaves_no_pause_and_a_closed_client_no_thread(client: Client, served: Served) -> None:
    keeper, stands = served.server.head.running.pauses, threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "_pause", stands.wait)
        patch.setattr(Client.pause, "__kwdefaults__", {**(Client.pause.__kwdefaults__ or {}), "wait": 0.05})
        with pytest.raises(ControlTimeout, match=r"still draining after 0\.05 s"):
            client.restore(b"")
        stands.set()
    assert client.pauses().leases == ()
    with connect(served.server.url, token=served.writer.token) as other:
        held = other.pause(ttl=0.3).__enter__()._thread
    assert held is not None
    held.join(20)
    assert not held.is_alive()


async def test_the_asyncio_twin(served: Served) -> None:
    for ours, twin in ((Client, AsyncClient), (RemoteBatches, AsyncBatches)):
        lacks = {name for name in set(dir(ours)) - set(dir(twin)) if not name.startswith("_")}
        assert lacks <= {"next"}, "its twin is __anext__"

    async def poll() -> None:
        while True:
            with suppress(TimeoutError):
                await client.next_batch(timeout=0)
                return
            await asyncio.sleep(0)

    async def read_all() -> None:
        while await client.next_batch(timeout=0.2) is not None:
            pass

    frames = 0
    async with AsyncClient(connect(served.server.url, token=served.writer.token)) as client:
        before = (await client.models()).version
        async with client.deliveries(frames=90) as batches:
            async for batch in batches:
                frames += batch.num_frames
        assert batches.num_frames == frames == 90
        assert client.url == served.server.url
        assert {name for name in dir(Fleet) if not name.startswith("_")} <= set(dir(client))
        update = await client.publish(numbered(before + 1), metadata={"learner": "async"})
        assert update.version == before + 1
        assert (await (await update.wait(30)).refresh()).state == "applied"
        assert (await client.weights()).metadata == {"learner": "async"}
        assert (await client.spaces())[0].shape
        assert await client.version() == (await client.stats()).version
        await asyncio.wait_for(poll(), 30)
        first = asyncio.ensure_future(client.next_batch())
        await asyncio.sleep(0)
        first.cancel()  # its batch goes to the next call
        taken = await client.next_batch(timeout=30, copy=True)
        assert taken is not None
        assert taken.batch_size == (NUM_ENVS, 10)
        resumed = asyncio.ensure_future(anext(e.id async for e in client.events() if e.kind == "resumed"))
        while not resumed.done():  # it may not listen yet
            async with client.pause(owner="async") as pause:
                assert pause.lease.state == "paused"
                with pytest.raises(TimeoutError, match=r"no batch came from .* within 0.2 s"):
                    await read_all()
        assert await resumed
    for call in (client.next_batch, client.status, client.spaces):
        with pytest.raises(FleetClosed, match="the client is closed; connect again"):
            await call()
    await client.close()


def test_link_publishes_every_other_update(client: Client) -> None:
    module = nn.ParameterDict(numbered(0))
    link = LearnerLink(client, module, publish_every=2, frames=180)
    began = link.version
    for batch in link.batches():
        assert batch.batch_size == (NUM_ENVS, 10)
        with torch.no_grad():
            module["number"] += 1
        link.step()
    assert link.num_updates == 6
    assert began < link.version <= began + 3
    assert link.staleness.max >= link.staleness.mean >= 0
    assert client.weights().numpy()["number"] == 6


def test_next_batch_holds_nothing_that_another_iteration_waits_for(client: Client) -> None:
    assert client.next_batch(timeout=30) is not None
    assert client.status().queue.lent >= 1
    client.streaming_split(2)
    until_nothing_is_lent(client)


async def test_asynchronous_next_batch_holds_nothing_either(client: Client, served: Served) -> None:
    async with AsyncClient(served.server.url, token=served.writer.token) as twin:
        for iterate in (twin.batches, twin.deliveries, lambda: twin.streaming_split(2)):
            assert await twin.next_batch(timeout=30) is not None
            held = iterate()
            if isinstance(held, AsyncBatches):
                await held.__aexit__(None)
            await asyncio.to_thread(until_nothing_is_lent, client)


def test_a_block_acknowledges_when_nothing_is_fetched_any_more(client: Client) -> None:
    """What an acknowledgement makes room for must not be sent to a fetch that is being broken off: it would be lost
    until its time to acknowledge is over.
    """
    fetching: list[list[str]] = []
    with client.deliveries() as batches:
        batch = next(batches)
        acknowledge = batch._on_ack

        def noted(given: Any) -> None:
            fetching.append([one.name for one in threading.enumerate() if one.name == "cormorant-batches"])
            acknowledge(given)

        batch._on_ack = noted
    assert fetching == [[]]
    until_nothing_is_lent(client)


def test_shards_carry_what_they_need_and_show_no_token(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps({"write": served.writer.token}))
    with monkeypatch.context() as environment:
        environment.setenv("CORMORANT_URL", served.server.url)
        environment.setenv("CORMORANT_TOKEN_FILE", str(tmp_path / "tokens.json"))
        with connect() as client:
            (shard,) = client.streaming_split(1)
    assert served.writer.token not in repr(shard)
    (tmp_path / "tokens.json").unlink()
    with pickle.loads(pickle.dumps(shard)).iter_batches() as batches:  # our own
        assert next(batches).batch_size == (NUM_ENVS, 10)


# -- the command line ------------------------------------------------------------------------------------------


@pytest.fixture
def command(served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    token_file = tmp_path / "tokens.json"
    token_file.write_text(json.dumps({"read": served.reader.token, "write": served.writer.token}))
    monkeypatch.setenv("CORMORANT_URL", served.server.url)
    monkeypatch.setenv("CORMORANT_TOKEN_FILE", str(token_file))
    monkeypatch.delenv("CORMORANT_TOKEN", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = entry.run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def document_in(said: str) -> Any:
    """The JSON that a command printed, after what the head in this process logged."""
    return json.loads(said[said.index("{") :])


def test_weights_by_command(command: Any, tmp_path: Path, client: Client) -> None:
    client.publish(numbered(2))
    client.publish(numbered(3))
    path = tmp_path / "w.safetensors"
    assert command("weights", "pull", path)[0] == 0
    code, out, _ = command("weights", "push", path)
    assert (code, "applied, 1 of 1 workers" in out) == (0, True)
    version = client.models().version
    assert command("weights", "list", "--model", "policy")[1].split()[0] == str(version)
    assert f"version {version}" in command("weights", "list")[1]
    code, out, _ = command("weights", "rollback", version - 1)
    assert (code, f"version {version + 1} has the weights of version {version - 1}" in out) == (0, True)
    pulled = document_in(command("weights", "pull", path, "--json")[1])
    assert pulled == {"file": str(path), "model": "policy", "version": version + 1, "bytes": path.stat().st_size}
    assert document_in(command("weights", "rollback", version, "-o", "json")[1])["version"] == version + 2
    path.write_bytes(b"\x80\x02}q\x00.")
    code, _, err = command("weights", "push", path, "--url", "http://127.0.0.1:9")  # where no head is
    assert (code, "are a pickle (torch.save); save them with safetensors" in err) == (2, True)


def test_pause_state_and_status_by_command(command: Any, tmp_path: Path) -> None:
    lease = document_in(command("pause", "--json")[1])["lease"]
    assert (lease["owner"], lease["state"]) == ("default", "paused")
    assert "by default" in command("status")[1]
    assert command("state", "save", tmp_path / "s")[0] == 0
    assert command("state", "load", tmp_path / "s")[0] == 0
    assert command("resume")[1].splitlines()[-1] == "resumed"
    assert document_in(command("resume", "--json")[1])["state"] == "running"
    saved = document_in(command("state", "save", tmp_path / "s", "--json")[1])
    assert saved == {"file": str(tmp_path / "s"), "bytes": (tmp_path / "s").stat().st_size}
    assert document_in(command("state", "load", tmp_path / "s", "--json")[1]) == saved
    assert command("state", "load", tmp_path / "nothing")[0] == 2
    (tmp_path / "text").write_text("no saved state at all")
    code, _, err = command("state", "load", tmp_path / "text", "--json")
    assert (code, "is not safetensors" in document_in(err)["error"]) == (1, True)
    assert command("status")[1].splitlines()[0] == "counting: Running"
    assert document_in(command("status", "--json")[1])["phase"] == "Running"
    code, _, err = command("status", "--token", "wrong")
    assert (code, len(err.splitlines())) == (1, 1)
    assert command("status", "--token-file", "/nowhere")[0] == 2


def test_a_seed_is_given_to_every_worker(client: Client, served: Served) -> None:
    # The last one: what `checker` knows of the streams is over.
    last_id = f"{client.status().epoch}-{served.server.head.events.end - 1}"
    with client.pause():
        assert client.seed(9) == ("cpu-0",)
        assert client.stats().is_paused
    told = (event for event in client.events(last_id=last_id) if event.kind in ("paused", "seeded", "resumed"))
    assert [next(told).kind, next(told).reason, next(told).kind] == ["paused", "seed 9", "resumed"]


def test_a_head_is_closed_twice_while_a_batch_is_mapped(tmp_path: Path) -> None:
    job = make_job(collection={"framesPerBatch": 20})
    with serve(job, directory=tmp_path) as served, connect(served.server.url, token=served.writer.token) as client:
        deliveries = client.deliveries(prefetch=0)
        next(deliveries)
        for _ in range(2):
            served.server.close()
