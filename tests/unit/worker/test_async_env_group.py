"""Environments that come back whenever they like: a VectorEnv whose order of arrival hypothesis chooses."""

from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cormorant_testing.collecting import SEEDS, make_checker, make_collector
from cormorant_testing.envs import ACTION_SPACES, OBSERVATION_SPACES, Oracle
from cormorant_worker.collect.batch import to_tensordict
from cormorant_worker.collect.block import Block
from cormorant_worker.envs.protocol import Rows, Step, VectorEnv
from cormorant_worker.spaces import Arrays, flatten


class ArrivingEnv(VectorEnv):
    """CountingEnvs that arrive in an order drawn beforehand, `min_in_flight` or fewer at a time, like EnvPool's."""

    lockstep = False

    def __init__(self, seeds: Sequence[int], order: Iterator[int], *, arrive: int, **options: object) -> None:
        self.num_envs, self.min_in_flight = len(seeds), arrive
        self.observation_space, self.action_space = OBSERVATION_SPACES["box"], ACTION_SPACES["discrete"]
        self._order = order
        self._oracles = [Oracle(seed=seed, **options) for seed in seeds]
        self._at = [(0, 0)] * len(seeds)
        self._under_way: dict[int, int] = {}

    def start(self) -> Arrays:
        return (np.stack([oracle.obs(0, 0) for oracle in self._oracles]),)

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        numbers = range(self.num_envs) if isinstance(rows, slice) else rows.tolist()
        for row, action in zip(numbers, actions[0].tolist(), strict=True):
            assert row not in self._under_way, f"row {row} was sent twice"
            self._under_way[row] = action

    def recv(self) -> Step:
        assert len(self._under_way) >= self.min_in_flight, "recv would wait for ever"
        waiting = sorted(self._under_way)
        rows = [waiting.pop(next(self._order) % len(waiting)) for _ in range(self.min_in_flight)]
        # Some receives bring only rows whose transition is not known yet: EnvPool's ends take a step more.
        hidden = [row for row in rows[1:] if next(self._order) % 7 == 6]
        return self._step([row for row in rows if row not in hidden])

    def _step(self, rows: list[int]) -> Step:
        obs, reward, terminated, truncated, ended, final = [], [], [], [], [], []
        for position, row in enumerate(rows):
            episode, step = self._at[row]
            moment = self._oracles[row].moment(episode, step + 1, self._under_way.pop(row))
            obs.append(moment.obs)
            reward.append(moment.reward)
            terminated.append(moment.terminated)
            truncated.append(moment.truncated)
            self._at[row] = (episode, step + 1)
            if moment.final is not None:
                ended.append(position)
                final.append(moment.final)
                self._at[row] = (episode + 1, 0)
        finals = np.stack(final) if final else np.zeros((0, 4), np.float32)
        return Step(
            np.array(rows, np.int64), flatten(self.observation_space, np.stack(obs)),
            np.array(reward, np.float32), np.array(terminated), np.array(truncated),
            np.array(ended, np.int64), (finals,),
        )  # fmt: skip


@given(
    num_envs=st.integers(1, 6),
    data=st.data(),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    ends=st.sampled_from(["terminate", "alternate"]),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    policy=st.sampled_from(["", "counter", "with_outputs"]),
    warmup=st.sampled_from([0, 11]),
)
@settings(max_examples=30)
def test_any_order_of_arrival_is_exact(
    num_envs: int, data: st.DataObject, lengths: list[int], ends: str, sizes: list[int], policy: str, warmup: int
) -> None:
    arrive = data.draw(st.integers(1, num_envs))
    # An arrival order with a bias: some environments are asked far more often than others.
    bias = data.draw(st.integers(1, 6))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    order = iter(lambda: int(generator.integers(0, 100) ** bias // 100 ** (bias - 1)), -1)
    env = ArrivingEnv(SEEDS.env_seeds(num_envs), order, arrive=arrive, lengths=tuple(lengths), ends=ends)
    collector = make_collector(num_envs=num_envs, envs=[env], policy=policy, warmup=warmup if policy else 0)
    checker = make_checker(num_envs, lengths=lengths, ends=ends)
    block = Block(collector.layout(40))
    random = 0
    for size in sizes:
        assert collector.fill(block, size).num_frames == size
        random += int((block.versions == -1).sum())
        assert checker.take(to_tensordict(block)) == size
    # A batch that is told to end has what had landed already, or what the next arrivals bring.
    collector.gate.seal()
    sealed = collector.fill(block, sizes[0]).num_frames
    assert 1 <= sealed <= sizes[0]
    assert checker.take(to_tensordict(block)) == sealed
    collector.gate.unseal()
    random += int((block.versions == -1).sum())
    assert collector.fill(block, 40).num_frames == checker.take(to_tensordict(block)) == 40
    random += int((block.versions == -1).sum())
    # Fast columns may have played random frames that are not handed over yet, never more of them.
    if policy:
        assert random == warmup or (random < warmup and int(collector.pulse[0]) > checker.frames)
    # Frames beyond the batches are under way or kept; none was stepped without being kept.
    assert int(collector.pulse[0]) >= checker.frames == sum(sizes) + sealed + 40


def test_column_far_ahead_waits_and_the_ring_stays_bounded() -> None:
    # Rows 0 and 1 come 150 times before row 2 comes once: two must be under way, so they cannot wait for it.
    env = ArrivingEnv(SEEDS.env_seeds(3), cycle([0] * 450 + [2, 0, 0]), arrive=2, lengths=(4,))
    collector = make_collector(envs=[env])
    checker = make_checker(lengths=4)
    for _ in range(3):
        checker.take(collector.collect(num_steps=30))
    assert checker.frames == 3 * 30


def test_new_trajectories_begin_from_the_initial_state() -> None:
    generator = np.random.default_rng(1)
    env = ArrivingEnv(SEEDS.env_seeds(4), iter(lambda: int(generator.integers(0, 9)), -1), arrive=2, lengths=(50,))
    collector = make_collector(num_envs=4, envs=[env], policy="counter")
    collector.collect(num_steps=20)
    for env_group in collector.env_groups:
        env_group.restart()
    begun = 0
    for _ in range(2):
        batch = collector.collect(num_steps=40)
        init = batch["is_init"].squeeze(-1)
        assert (batch["count"][init] == 0).all()
        begun += int(init.sum())
    assert begun >= 4


def test_spilled_frames_keep_the_version_that_acted() -> None:
    generator = np.random.default_rng(0)
    env = ArrivingEnv(SEEDS.env_seeds(3), iter(lambda: int(generator.integers(0, 9)), -1), arrive=1)
    collector = make_collector(envs=[env], policy="counter")
    checker = make_checker(lengths=5)
    seen = set()
    for version in range(1, 20):
        collector.weights.offer(collector.weights.current(), version=version)
        batch = collector.collect(num_steps=9)
        checker.take(batch)
        versions = batch["collector", "policy_version"]
        assert int(versions.max()) == version
        seen |= set((version - versions).flatten().tolist())
    assert seen >= {0, 1}


def test_an_onlooker_sees_where_each_environment_is() -> None:
    env = ArrivingEnv(SEEDS.env_seeds(3), cycle((0, 3, 1, 5, 2)), arrive=2, lengths=(5,))
    collector = make_collector(num_envs=3, envs=[env])
    block = Block(collector.layout(10))
    idents = [float(collector.look(column, 0)[0]) for column in range(3)]
    for _ in range(5):
        collector.fill(block, 30)
        for column, ident in enumerate(idents):
            shown, last = collector.look(column, 0), block.observation[0][9, column]
            assert shown[0] == ident == last[0]
            assert tuple(shown[1:3]) > tuple(last[1:3]), "ahead of what was handed over"
