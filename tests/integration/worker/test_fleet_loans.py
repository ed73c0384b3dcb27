"""Several loans at a time, draining, events: what the head builds on, with real processes."""

import threading

import pytest

from cormorant_testing.collecting import make_job, scene
from cormorant_testing.fleets import make_fleet, reading
from cormorant_testing.scripts import until
from cormorant_worker.errors import ControlTimeout, FleetError
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions


def test_loans_keep_values_use_capacity_and_return_in_any_order() -> None:
    job, checker = scene("", lengths=4, collection={"totalFrames": 400}, queue={"capacityBatches": 3})
    with make_fleet(job, workers=1) as fleet:
        loans = [fleet.borrow() for _ in range(3)]
        kept = [loan.tensordict(copy=True) for loan in loans]
        with pytest.raises(ControlTimeout, match=r"no batch came within 0\.5 s"):
            fleet.borrow(timeout_s=0.5)  # 3 out: nothing more is accepted
        stepped = fleet.stats().stepped_frames
        assert stepped == 5 * 20  # and 2 with the worker
        assert [loan.parts[0].worker for loan in loans] == ["cpu-0"] * 3
        for loan, before in zip(loans, kept, strict=True):
            assert (loan.tensordict() == before).all()
            checker.take(before)
            part = loan.parts[0]
            # The block lies in the part's memory from its first byte on: another process may map it.
            assert bytes(part.memory.buffer[: part.block.observation[0].nbytes]) == part.block.observation[0].tobytes()
        loans[1].release()
        loans[1].release()
        with pytest.raises(FleetError, match="was given back"):
            loans[1].tensordict()
        with fleet.borrow(timeout_s=20) as fourth:  # one came back: one goes out
            checker.take(fourth.tensordict(copy=True))
        threads = [threading.Thread(target=loan.release) for loan in (*loans, *loans)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while (loan := fleet.borrow(timeout_s=20)) is not None:
            with loan:
                checker.take(loan.tensordict())
        assert checker.frames == fleet.stats().frames == 400
        assert fleet._core.queue.blocks.room == fleet._core.queue.blocks.limit


def test_a_drained_fleet_gives_what_it_has_and_ends_its_workers() -> None:
    job, checker = scene("", lengths=4, step_s=0.002, collection={"mode": "sync"}, queue={"capacityBatches": 2})
    with reading(job, workers=2, floor_frames=1000, epoch=4) as (fleet, reader):
        checker.take(reader.next_batch())
        assert {epoch for (_, _, _, epoch), _ in checker.streams} == {4}
        fleet.pause()  # drained all the same
        fleet.drain()
        while (loan := fleet.borrow(timeout_s=60)) is not None:
            with loan:
                checker.take(loan.tensordict())
        until(lambda: not fleet.stats().workers)
        stats = fleet.stats()
        assert (fleet.is_done, fleet.found_frames, stats.paused) == (True, 1000, False)
        assert (stats.frames, stats.stepped_frames) == (1000 + checker.frames, checker.frames)
        assert (stats.dropped, stats.restarts) == ({}, 0)


def test_drained_fleet_whose_workers_stay_is_saved_while_a_batch_is_out() -> None:
    options = FleetOptions(workers=1, waits_for_places=True, control_timeout_s=10.0)
    with WorkerFleet(make_job(num_envs=2, lengths=4), options) as fleet, fleet.borrow():
        fleet.drain()
        while fleet.skip(timeout_s=60.0):  # the queue may be full by now, with another batch waiting for a place
            pass
        assert fleet.is_done
        assert fleet.state()
