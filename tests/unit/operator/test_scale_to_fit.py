"""ScaleToFit: whichever slots find no node, the head counts on all others."""

from itertools import count, islice

from hypothesis import given, settings
from hypothesis import strategies as st

from cormorant_operator.decide.plan import DeletePod
from cormorant_operator.pods import Obstacle
from cormorant_testing.operator_world import World, of_kind


@settings(max_examples=30)
@given(size=st.integers(1, 6), late=st.sets(st.integers(0, 5)), fewest=st.integers(1, 3), fewer=st.integers(1, 6))
def test_every_slot_but_those_that_wait_is_counted_on(size: int, late: set[int], fewest: int, fewer: int) -> None:
    fewest = min(fewest, size)
    world = World(
        replicas=size,
        workerGroups=[{"name": "cpu", "minReplicas": fewest}],
        runPolicy={"onUnschedulable": "ScaleToFit", "unschedulableAfterSeconds": 600, "progressDeadlineSeconds": 0},
    )
    world.settle()
    world.start("pong-head-1")
    late &= set(range(size))
    for pod in world.live():
        if pod.index in late:
            world.block(pod.name, Obstacle.UNSCHEDULABLE, "0/3 nodes are available")
        else:
            world.start(pod.name)
    world.settle()
    assert counted_on(world) == set(range(size)), "a wait that is not late yet changes nothing"
    world.wait(600)
    fitting = set(range(size)) - late
    is_enough = len(fitting) >= fewest
    assert counted_on(world) == (fitting if is_enough else set(range(size)))
    assert len(world.live()) == size, "pods that wait keep their place in the queue"
    # A pod beyond a smaller size goes only after the head was told not to count on its slot.
    world.edit(replicas=max(fewest, min(size, fewer)))
    for _ in range(4):
        let_go = {order.pod.index for order in of_kind(world.plan().actions, DeletePod) if order.pod.is_ready}
        assert not let_go & counted_on(world)
        world.step()
    world.apply(replicas=size)
    world.then.start_all()
    assert counted_on(world) == set(range(size))
    assert world.known.answer is not None
    assert not world.known.answer.empty_slots


def counted_on(world: World) -> set[int]:
    """Slots that the head fills, as it reads what it was told last."""
    answer = world.known.answer
    assert answer is not None
    skipped = answer.empty_slots.get("cpu", ())
    return set(islice((index for index in count() if index not in skipped), answer.sizes["cpu"]))
