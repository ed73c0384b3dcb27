"""A schedule straight on a fleet, in this process."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from cormorant_contract.errors import BatchTimeout
from cormorant_testing.chaos.judge import Finding, compare, extract
from cormorant_testing.chaos.plan import Plan
from cormorant_testing.chaos.witness import LIFE, SEED, STEP
from cormorant_testing.chaos.world import CONTROL_S, HANG_S, LIMIT_S, STARTUP_S, SmallDisk, Watch, World, within
from cormorant_testing.checked_loop import check_every_turn
from cormorant_testing.fleets import open_on
from cormorant_testing.policies import numbered
from cormorant_worker.errors import ControlTimeout, FleetClosed, StateError, WorkerFailed
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.local_fleet import LocalFleet
from cormorant_worker.sinks.dataset import existing_dataset
from cormorant_worker.sinks.verify import verify

check_every_turn()


class FleetWorld(World):
    refusals = (ControlTimeout, StateError)

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan)
        if plan.has_dataset and plan.theme == "disk":
            (folder / "disk").mkdir()
            self._disk = SmallDisk(folder / "disk")
        self._dataset = (folder / "disk" / "data").as_uri() if plan.has_dataset else ""
        self._nap_s = 0.0
        self._has_restored = False
        self._floor = 0
        self._consumer: threading.Thread
        self._failed: list[BaseException] = []
        self._open(plan.workers)

    # -- life --------------------------------------------------------------------------------------------------

    def _open(self, workers: int) -> None:
        options = FleetOptions(
            workers=workers,
            control_timeout_s=CONTROL_S,
            hang_timeout_s=HANG_S,
            startup_timeout_s=STARTUP_S[self._plan.engine],
            drain_timeout_s=4.0,
        )
        job = self._plan.job(self._dataset)
        self.fleet = within(
            STARTUP_S[self._plan.engine] + LIMIT_S,
            "opening the fleet",
            lambda: open_on(self._plan.engine, job, options),
        )
        self.reader = LocalFleet(self.fleet)
        self._watch = Watch("stats()", self.fleet.stats).__enter__()
        self._is_over = threading.Event()

    def _begin(self) -> None:
        self._consumer = threading.Thread(target=self._consume, name="consumer", daemon=True)
        self._consumer.start()

    def _consume(self) -> None:
        try:
            while not self._is_over.is_set():
                try:
                    batch = self.reader.next_batch(0.5)
                except BatchTimeout:
                    continue
                if batch is None:
                    return
                frames = self.judge.take(batch)
                if self._nap_s:
                    time.sleep(self._nap_s)
                    self._nap_s = 0.0
                    compare(frames, extract(batch), "a batch changed while it was read")
        except FleetClosed:
            return
        except BaseException as error:  # noqa: BLE001  # the thread's edge: raised by `check`
            if not (self._is_full and isinstance(error, WorkerFailed) and "No space left" in str(error)):
                self._failed.append(error)

    def check(self) -> None:
        self._watch.check()
        if self._failed:
            raise self._failed[0]

    def _calm(self) -> None:
        if self._plan.thaws:
            self._thaw()
        self._call("resume()", self.fleet.resume)
        version = self._publish(0.0)

        def acts_everywhere() -> bool:
            receipt = self._call("receipt()", lambda: self.fleet.receipt(version))
            return not receipt.waiting and not receipt.refused and self.judge.newest >= version

        self._until(f"version {version} acts everywhere", acts_everywhere)

    def _end(self) -> None:
        self._call("drain()", self.fleet.drain)
        self._until_the_stream_ends("a drained fleet")
        stats = self._call("stats()", self.fleet.stats)
        self._close()
        self.judge.finish()
        dropped = dict(stats.dropped)
        late = dropped.pop("drop_oldest", 0)
        if self._dataset:
            dropped.pop("stale", 0)  # the dataset has them, and they count
        if not self._has_restored:
            new = stats.frames - self._floor
            _equal(stats.stepped_frames, new + sum(dropped.values()), f"stepped frames of {stats}")
            if not self._dataset:
                _equal(self.judge.frames, stats.frames - late, f"delivered frames of {stats}")
                if self._plan.normalizes:
                    assert self.fleet.statistics is not None
                    moments = self.fleet.statistics.current.moments["observation"]
                    _equal(moments.count, self.judge.frames, "frames in the statistics")
        if self._dataset:
            self._judge_dataset(stats.frames)

    def _judge_durable(self) -> int:
        report = verify(self._dataset)
        if not report.is_good:
            raise Finding(f"the dataset is broken: {report.problems}")
        return report.frames

    def _judge_dataset(self, frames: int) -> None:
        _equal(self._judge_durable(), frames, "frames in the dataset")
        seen: set[int] = set()
        for frames in existing_dataset(self._dataset).iter_trajectories():
            obs, traj_id = np.concatenate([frames.observation[0], frames.next_values[0]]), int(frames.traj_id[0])
            if traj_id in seen:
                raise Finding(f"trajectory {traj_id} is in the dataset twice")
            seen.add(traj_id)
            is_one = (obs[:, [SEED, LIFE]] == obs[0, [SEED, LIFE]]).all() and (np.diff(obs[:, STEP]) == 1).all()
            if not is_one:
                raise Finding(f"trajectory {traj_id} of the dataset is no stretch of one episode: {obs}")

    def _until_the_stream_ends(self, whose: str) -> None:
        self._until(f"the end of the stream of {whose}", lambda: not self._consumer.is_alive())
        self.check()

    def _close(self) -> None:
        self._is_over.set()
        try:
            within(LIMIT_S + 10, "close()", self.fleet.close)
        finally:
            self._watch.__exit__()
        self.check()

    def how_it_stands(self) -> str:
        receipt = self._call("receipt()", lambda: self.fleet.receipt(self._version))
        return f"newest frame {self.judge.newest}; {receipt}; {self._call('stats()', self.fleet.stats)}"

    def clean_up(self) -> None:
        """After a finding, end what may be stuck."""
        self._is_over.set()
        self._thaw()
        with suppress(Exception):
            within(20, "close()", self.fleet.close)
        if self._disk is not None:
            self._disk.close()

    # -- what happens ------------------------------------------------------------------------------------------

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        return within(LIMIT_S, what, call)

    def _pids(self) -> list[int]:
        stats = self._call("stats()", self.fleet.stats)
        return [worker.pid for worker in stats.workers if worker.pid]

    def _publish(self, amount: float) -> int:
        self._version += 1
        version = self._version
        self._call("publish()", lambda: self.fleet.publish(numbered(version), version=version))
        return version

    def _pause(self, amount: float) -> None:
        try:
            self._call("pause()", self.fleet.pause)
            before = self._call("stats()", self.fleet.stats).stepped_frames
            time.sleep(amount)
            _equal(self._call("stats()", self.fleet.stats).stepped_frames, before, "frames stepped during a pause")
        finally:
            self._call("resume()", self.fleet.resume)

    def _resize(self, amount: float) -> None:
        self._call("resize()", lambda: self.fleet.resize({"cpu": 1 + int(6 * amount)}, wait=False))

    def _save(self, amount: float) -> None:
        self._saved = self._call("state()", self.fleet.state)

    def _restore(self, amount: float) -> None:
        if not self._saved:
            self._save(amount)
        # Some of what follows the saved state has been delivered by now.
        self.judge.may_miss = self._has_restored = True
        self._call("restore()", lambda: self.fleet.restore(self._saved))

    def _seed(self, amount: float) -> None:
        self._seeds += 1
        self.judge.may_miss = True  # what asynchronous environments were ahead is dropped
        self._call("seed()", lambda: self.fleet.seed(self._seeds))

    def _slow(self, amount: float) -> None:
        self._nap_s = 2 * amount

    def _size(self) -> int:
        return sum(worker.name.startswith("cpu-") for worker in self._call("stats()", self.fleet.stats).workers) or 1

    def _fill_disk(self, amount: float) -> None:
        """The fleet ends with a sentence about it, and a new one goes on with what is durable."""
        assert self._disk is not None
        self._thaw()
        self._call("resume()", self.fleet.resume)
        size, self._is_full = self._size(), True
        self._disk.fill()
        self._until_the_stream_ends("a fleet whose disk is full")
        self._close()
        self._disk.free()
        self._is_full = False
        self._floor = self._judge_durable()
        self._open(size)
        self._begin()

    def _move(self, amount: float) -> None:
        """The state goes on in another fleet."""
        self._thaw()
        self._call("pause()", self.fleet.pause)
        self._saved = self._call("state()", self.fleet.state)
        size = self._size()
        deadline = time.monotonic() + self._calm_s
        while self._call("stats()", self.fleet.stats).queued_batches and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)  # the last one is with the consumer
        self._close()
        self._consumer.join(LIMIT_S)
        self.check()
        self._open(size)
        self.judge.may_miss = self._has_restored = True
        self._call("restore()", lambda: self.fleet.restore(self._saved))
        self._begin()


def _equal(found: int, expected: int, what: str) -> None:
    if found != expected:
        raise Finding(f"{what}: {found}, not {expected}")
