"""A head that is killed at one step of a restore after the other: the next head is exact, and restores the state."""

import http.client
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import safetensors.numpy
import yaml

from cormorant_testing.collecting import make_job
from cormorant_testing.heads import START_S, HeadProcess
from cormorant_testing.scripts import until
from cormorant_testing.serving import Api, weights_file

TOTAL = 2000
QUIESCE = "cormorant_worker.fleet.turn.quiesce:Quiesce"
ANSWERS = "restore its state"
STEPS = (
    # When, the function, a word among its arguments; whether the count of the state is kept from there on, and its
    # weights.
    ("before", "cormorant_api.routes.control:parse_body", "", False, False),
    ("before", f"{QUIESCE}.restore", "", False, False),
    ("before", f"{QUIESCE}.replies", ANSWERS, False, False),
    ("after", "cormorant_worker.fleet.fleet:WorkerFleet.restore", "", False, False),
    ("before", "cormorant_api.weights.publisher:WeightPublisher.adopt", "", True, False),
    ("after", "cormorant_api.weights.publisher:WeightPublisher.adopt", "", True, True),
)


class Deliveries:
    """Everything that learners got, over all heads."""

    def __init__(self) -> None:
        self.settled = 0
        """Frames that the next head must not collect again."""
        self.ids: set[int] = set()

    def take(self, api: Api, batches: int) -> int:
        """Take and acknowledge batches (fewer where the job ends), whose trajectories came in none before these.
        Returns their frames.
        """
        frames, ids = 0, set()
        for _ in range(batches):
            reply = api.get("/v1/batches/next?wait=60")
            if reply.status == 410:
                break
            assert reply.status == 200, reply
            assert api.post(f"/v1/batches/{reply.headers['cormorant-batch-id']}/ack").status == 204
            frames += int(reply.headers["cormorant-frames"])
            arrays = safetensors.numpy.load(reply.body)
            ids |= {
                number
                for name, array in arrays.items()
                if name.endswith("collector/traj_ids")
                for number in array.flatten().tolist()
            }
        assert ids
        assert not ids & self.ids, "a trajectory id names one episode"
        self.ids |= ids
        return frames


def pause(api: Api) -> None:
    assert api.post("/v1/pauses", {"owner": "test", "ttl_seconds": 600, "wait_seconds": 60}).status == 201


def restore(api: Api, state: bytes) -> None:
    """Restore and go on."""
    pause(api)
    reply = api.put("/v1/state", state)
    assert reply.status == 200, reply
    assert (reply.json["frames"]["collected"], reply.json["weights"]["version"]) == (count_of(state), 4)
    api.post("/v1/resume", {"owner": "test"})


def count_of(state: bytes) -> int:
    from cormorant_worker.fleet.fleet_state import FleetState

    return FleetState.from_bytes(state).frames


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_head_killed_at_any_step_of_a_restore_leaves_the_next_one_exact(tmp_path: Path) -> None:
    job = make_job(
        num_envs=2, policy="versioned", action="box", lengths=(3, 8), workers=2, collection={"totalFrames": TOTAL}
    )
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(job.to_document()))
    saved, taken = Deliveries(), Deliveries()
    with HeadProcess(manifest, tmp_path / "first", "--workers", "2") as head:
        api = head.api()
        assert api.put("/v1/models/policy/weights?version=4", weights_file(4), Prefer="wait=60").status == 200
        saved.take(api, 40)
        pause(api)
        state = api.get("/v1/state").body
        head.kill()
    assert count_of(state) >= 800
    version = 0
    for when, function, word, keeps_count, keeps_weights in STEPS:
        how = ("cormorant_testing.killed_head", when, function, word)
        with HeadProcess(manifest, tmp_path / "second", "--workers", "2", module=how) as head:
            api = head.api()
            status = api.get("/v1/status").json
            assert (status["frames"]["settled"], status["weights"]["version"]) == (taken.settled, version), function
            taken.settled += taken.take(api, 1)
            pause(api)
            below = psutil.Process(head.process.pid).children(recursive=True)
            with suppress(OSError, http.client.HTTPException):
                pytest.fail(f"the head was not killed: {api.put('/v1/state', state)}")
            assert head.process.wait(60) == -9
            assert psutil.wait_procs(below, timeout=START_S)[1] == [], "workers outlive their head"
            taken.settled = max(taken.settled, count_of(state)) if keeps_count else taken.settled
            version = 4 if keeps_weights else version
    taken.ids |= saved.ids  # restoring a state brings its ids back
    for is_last in (False, True):
        with HeadProcess(manifest, tmp_path / "second", "--workers", "2") as head:
            api = head.api()
            assert api.get("/v1/status").json["frames"]["settled"] == taken.settled
            restore(api, state)
            if not is_last:
                taken.settled = max(taken.settled, count_of(state) + taken.take(api, 10))
                head.kill()
            else:
                assert count_of(state) + taken.take(api, TOTAL) == TOTAL
                until(lambda: head.process.poll() is not None)
                assert head.process.returncode == 0, head.text
