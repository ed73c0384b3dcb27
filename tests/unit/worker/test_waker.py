"""What wakes a fleet's thread."""

import os
import select

from cormorant_worker.fleet.waker import Waker


def is_awake(waker: Waker) -> bool:
    return bool(select.select([waker], [], [], 0)[0])


def test_wake_never_waits_however_often() -> None:
    waker = Waker()
    for _ in range(200_000):  # it counts them once
        waker.wake()
    assert is_awake(waker)
    waker.clear()
    assert not is_awake(waker)
    waker.wake()
    assert is_awake(waker)
    waker.close()


def test_wake_after_close_writes_to_no_other_file() -> None:
    waker, (read, stranger) = Waker(), os.pipe()
    descriptor = waker.fileno()
    waker.close()
    os.dup2(stranger, descriptor)
    waker.wake()
    assert not select.select([read], [], [], 0)[0], "the waker wrote into a pipe that is not its own"
    waker.close()
    for each in (read, stranger, descriptor):
        os.close(each)
