"""The fleet's end of a worker's socket: nothing waits, and the worker's end is that of multiprocessing."""

import os
from multiprocessing.reduction import recv_handle

import pytest

from cormorant_worker.fleet.local.channel import channel_pair


def test_messages_and_descriptors_arrive_in_order() -> None:
    ours, theirs = channel_pair()
    read, write = os.pipe()
    ours.send("small")
    ours.send("with a file", write)
    ours.send("after it")
    assert theirs.recv() == "small"
    assert theirs.recv() == "with a file"
    os.write(recv_handle(theirs), b"it is the file")
    assert os.read(read, 100) == b"it is the file"
    assert theirs.recv() == "after it"
    for size in (0, 1, 100_000):
        theirs.send(b"x" * size)
        found: list[object] = []
        while not found:
            found = ours.receive()
        assert found == [b"x" * size]
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


def test_a_peer_that_does_not_read_costs_memory_and_no_time() -> None:
    ours, theirs = channel_pair()
    read, write = os.pipe()
    for number in range(500):
        ours.send((number, b"x" * 10_000), write if number == 499 else -1)
    os.close(write)  # the message has its own
    assert ours.has_unsent
    for number in range(500):
        assert theirs.recv() == (number, b"x" * 10_000)
        ours.flush()
    assert not ours.has_unsent
    os.write(recv_handle(theirs), b"late")
    assert os.read(read, 10) == b"late"
    ours.close()


def test_half_a_message_is_kept_until_the_rest_comes() -> None:
    ours, theirs = channel_pair()
    whole, theirs_whole = channel_pair()
    whole.send({"a": 1})
    data = os.read(theirs_whole.fileno(), 1000)
    os.write(theirs.fileno(), data[:3])
    assert ours.receive() == []
    os.write(theirs.fileno(), data[3:10])
    assert ours.receive() == []
    assert ours.receive() == []  # nothing has come
    os.write(theirs.fileno(), data[10:] + data)
    assert ours.receive() == [{"a": 1}, {"a": 1}]
    ours.close()
    whole.close()
