import tempfile
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cormorant_testing.collecting import SEEDS, env_groups_of, make_checker, make_collector, make_job
from cormorant_testing.envs import ACTION_SPACES, OBSERVATION_SPACES
from cormorant_worker.collect.batch import to_tensordict
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.collector import Collector
from cormorant_worker.collect.place import WorkerPlace, egl_device
from cormorant_worker.collect.trajectories import trajectory_base
from cormorant_worker.envs.protocol import Rows, Step, VectorEnv
from cormorant_worker.errors import CormorantError, EnvBuildError, EnvError, InvalidAction, PolicyMismatch
from cormorant_worker.launch import make_collector as collector_of
from cormorant_worker.spaces import Arrays

LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=4)
ENDS = st.sampled_from(["terminate", "truncate", "both", "alternate"])


@st.composite
def failures(draw: st.DrawFn, num_envs: int) -> list[dict[str, Any]]:
    """Nothing; steps in which environments raise, by seed; or occasions on which any does, resets among them."""
    match draw(st.sampled_from(["none", "step", "occasion"])):
        case "step":
            seeds = SEEDS.env_seeds(num_envs)
            return [{"how": "raise", "step": draw(st.integers(1, 12)), "seeds": [seed]} for seed in seeds]
        case "occasion":
            # First resets are let through; a crash on the way to a first observation is not a restart but no start.
            skip, times = draw(st.integers(num_envs + 1, 14)), draw(st.integers(1, 2))
            return [{"at": draw(st.sampled_from(["reset", "step"])), "skip": skip, "times": times}]
    return []


class ArrivingEnv(VectorEnv):
    """CountingEnvs that arrive in an order drawn beforehand, `min_in_flight` or fewer at a time, like EnvPool's."""

    lockstep = False

    def __init__(self, num_envs: int, order: Iterator[int], *, arrive: int, **options: object) -> None:
        (self._envs,) = env_groups_of(num_envs, 1, options)
        self.num_envs, self.min_in_flight, self._order = num_envs, arrive, order
        self.observation_space, self.action_space = self._envs.observation_space, self._envs.action_space
        self._under_way: dict[int, int] = {}

    def start(self) -> Arrays:
        return self._envs.start()

    def restart(self, rows: Rows) -> Arrays:
        self._under_way.clear()
        return self._envs.restart(rows)

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        for row, action in zip(np.arange(self.num_envs)[rows].tolist(), actions[0].tolist(), strict=True):
            assert row not in self._under_way, f"row {row} was sent twice"
            self._under_way[row] = action

    def recv(self) -> Step:
        assert len(self._under_way) >= self.min_in_flight, "recv would wait for ever"
        waiting = sorted(self._under_way)
        rows = [waiting.pop(next(self._order) % len(waiting)) for _ in range(self.min_in_flight)]
        # Some receives bring only rows whose transition is not known yet: EnvPool's ends take a step more.
        hidden = [row for row in rows[1:] if next(self._order) % 7 == 6]
        rows = [row for row in rows if row not in hidden]
        self._envs.send((np.array([self._under_way.pop(row) for row in rows]),), np.array(rows))
        return self._envs.recv()


@given(data=st.data())
@settings(max_examples=180)
def test_any_schedule_is_exact(data: st.DataObject) -> None:
    """Sizes, lengths, ends, groups, cuts, resets at batches, random first frames, crashes and seals in one, and orders
    of arrival.
    """
    draw = data.draw
    num_envs, policy = draw(st.integers(1, 5)), draw(st.sampled_from(["", "counter", "with_outputs", "plain"]))
    sizes, arrives = (
        draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)),
        draw(st.sampled_from([0, 0, 0, 0, 1, 3])),
    )
    max_frames = draw(st.sampled_from([0, 0 if arrives else 1, 0 if arrives else 4]))
    crashes = [] if arrives else draw(failures(num_envs))
    # A crashed step makes no random frame, and a later batch begins with one more: see below.
    warmup = draw(st.sampled_from([0, 0, 3, 17, 40] if policy and not crashes else [0]))
    resets = not crashes and not arrives and draw(st.booleans())
    if resets:
        # A column without a frame in a batch has no last frame to mark: only whole rows reset every column alike.
        sizes = [num_envs * size for size in sizes]
    options = {"lengths": draw(LENGTHS), "ends": draw(ENDS)}
    groups = min(draw(st.integers(1, 2)), num_envs)
    with tempfile.TemporaryDirectory() as folder:
        crashes = [{**crash, "flag": f"{folder}/occasions"} if "at" in crash else crash for crash in crashes]
        envs = env_groups_of(num_envs, groups, {**options, "failures": crashes})
        if arrives:
            # Some environments come far more often than others.
            bias, numbers = draw(st.integers(1, 6)), np.random.default_rng(draw(st.integers(0, 1000)))
            order = iter(lambda: int(numbers.integers(0, 100) ** bias // 100 ** (bias - 1)), -1)
            envs = [ArrivingEnv(num_envs, order, arrive=min(arrives, num_envs), **options)]
        collector = make_collector(
            num_envs=num_envs, envs=envs, policy=policy, max_frames=max_frames, resets=resets, warmup=warmup, **options
        )
        kinds = {"versions": bool(policy), "crashes": bool(crashes), "max_frames": max_frames, "resets": resets}
        checker = make_checker(num_envs, **kinds, **options)
        block = Block(collector.layout(max(-(-size // num_envs) for size in sizes)))
        # What was in the memory must not shine through.
        for array in (*block.outputs, *block.states, block.is_init):
            array[:] = 1
        steps, seal_at, receive, random = 0, -1, envs[0].recv, 0

        def recv() -> Step:
            nonlocal steps
            steps += 1
            if steps == seal_at:
                collector.gate.ticket = -1  # sealed
            return receive()

        envs[0].recv = recv
        for size in sizes:
            steps, seal_at = 0, draw(st.sampled_from([-1, -1, 0, 1, 2, 12]))
            if seal_at == 0:  # before the batch began
                collector.gate.ticket = -1  # sealed
            filled = collector.fill(block, size)
            assert 1 <= filled.num_frames == block.num_frames <= size
            assert filled.num_frames == size or collector.gate.is_sealed
            assert not collector.gate.is_sealed or arrives or block.num_rows <= max(1, seal_at)
            collector.gate.ticket = 0
            assert not collector.gate.is_closed
            batch = to_tensordict(block)
            assert checker.take(batch) == filled.num_frames
            if policy:
                assert arrives or (np.diff(block.versions) >= 0).all()  # random ones first
                random += int((block.versions == -1).sum())
            if policy == "with_outputs":
                versions = batch["collector", "policy_version"]
                mask = batch["collector", "mask"] if ("collector", "mask") in batch.keys(True) else versions == versions
                acted = mask & (versions == 0)
                assert (batch["doubled"][acted] == batch["observation"][..., 2][acted] * 2).all()
                assert (batch["doubled"][~acted] == 0).all()
        ahead = int(collector.pulse[0]) - checker.frames
        assert checker.frames == collector.frames
        assert ahead >= 0 if arrives else not ahead
        # Random frames may be among those that are ahead, or under way, and are not handed over yet.
        assert 0 <= min(warmup, checker.frames) - random <= (ahead + num_envs if arrives else 0)
        # Those that had no frame of their own yet to follow the restart are seen in a later batch only.
        assert checker.restarts <= collector.env_restarts


@pytest.mark.parametrize("observation", sorted(OBSERVATION_SPACES))
@pytest.mark.parametrize("action", sorted(ACTION_SPACES))
def test_every_kind_of_observation_and_action_is_exact(observation: str, action: str) -> None:
    options = {"observation": observation, "action": action, "lengths": (3, 1, 4), "ends": "alternate"}
    collector, checker = make_collector(**options), make_checker(**options)
    for size in (12, 7, 6):
        assert checker.take(collector.collect(num_steps=size)) == size


def test_a_crashed_step_costs_no_random_frame() -> None:
    failures = [{"how": "raise", "step": 2, "seeds": [SEEDS.env_seeds(3)[1]]}]
    collector = make_collector(lengths=100, failures=failures, policy="counter", warmup=10)
    blocks = [Block(collector.layout(5)) for _ in range(2)]
    for block in blocks:
        collector.fill(block, 15)
    assert collector.env_restarts == 1
    assert [int((block.versions == -1).sum()) for block in blocks] == [9, 1]


def test_batches_have_the_names_and_keys_of_torchrl() -> None:
    batch = make_collector(lengths=3, policy="with_outputs").collect(num_steps=12)
    assert batch.names == [None, "time"]
    assert tuple(batch.shape) == (3, 4)
    assert set(batch.keys(include_nested=True, leaves_only=True)) == {
        "observation", "action", "doubled", ("extra", "twin"),
        ("next", "observation"), ("next", "reward"), ("next", "done"), ("next", "terminated"), ("next", "truncated"),
        ("collector", "traj_ids"), ("collector", "policy_version"),
    }  # fmt: skip
    assert tuple(batch["next", "reward"].shape) == (3, 4, 1)
    assert torch.equal(batch["doubled"], batch["observation"][..., 2] * 2)
    assert torch.equal(batch["extra", "twin"], batch["observation"][..., :2])


def test_an_action_of_one_byte_may_be_a_wider_number_that_fits() -> None:
    def acting(action: int) -> Collector:
        return make_collector(action="narrow", policy="constant", policy_kwargs={"action": action})

    assert acting(4).collect(num_steps=9)["action"].unique().tolist() == [4]
    for action, words in ((5, r"is 5 .*outside"), (257, "is int64 with 257")):
        with pytest.raises((InvalidAction, PolicyMismatch), match=words):
            acting(action).collect(num_steps=9)


@pytest.mark.parametrize(
    ("policy", "action", "words"),
    [
        ("nan_at", "box", r"environment 0 is \[nan, nan\] \(3 of 3 environments\)"),
        ("raising_at", "discrete", "cannot bear step 2"),
    ],
)
def test_a_bad_action_stops_before_any_environment_is_stepped(policy: str, action: str, words: str) -> None:
    collector = make_collector(action=action, policy=policy, policy_kwargs={"step": 2}, lengths=9)
    with pytest.raises((InvalidAction, RuntimeError), match=words):
        collector.collect(num_steps=30)
    assert int(collector.pulse[0]) == 2 * 3


@pytest.mark.parametrize("seed", SEEDS.env_seeds(4)[::3])
@pytest.mark.parametrize("is_restored", [False, True])
def test_a_step_left_under_way_by_a_batch_that_raised_is_not_of_the_next(
    seed: int, is_restored: bool, tmp_path: Path
) -> None:
    nan = {"how": "nan", "step": 4, "seeds": [seed], "flag": str(tmp_path / "once")}
    options: dict[str, Any] = {"num_envs": 4, "env_groups": 2, "lengths": 9}
    collector, checker = make_collector(failures=[nan], **options), make_checker(gaps=True, **options)
    saved = collector.state()
    with pytest.raises(EnvError, match="returned NaN"):
        collector.collect(num_steps=40)
    if is_restored:
        collector.restore(saved)
    checker.take(batch := collector.collect(num_steps=40))
    assert not batch["observation"][:, 0, 2].any()


def test_environments_of_other_spaces_do_not_mix() -> None:
    envs = [*env_groups_of(2, 1, {}), *env_groups_of(2, 1, {"observation": "discrete"})]
    with pytest.raises(EnvBuildError, match="have different spaces"):
        make_collector(envs=envs)


# -- whole episodes --------------------------------------------------------------------------------------------


@given(num_episodes=st.integers(1, 20), lengths=LENGTHS, env_groups=st.integers(1, 2), resets=st.booleans())
@settings(max_examples=20)
def test_exactly_n_episodes_in_fixed_shares(
    num_episodes: int, lengths: list[int], env_groups: int, resets: bool
) -> None:
    collector = make_collector(num_envs=3, env_groups=env_groups, lengths=lengths, resets=resets)
    collector.collect(num_steps=5)
    batch = collector.collect(num_episodes=num_episodes)
    assert batch.shape[0] == num_episodes
    mask = batch["collector", "mask"]
    done = batch["next", "done"].squeeze(-1)
    assert (done.sum(1) == 1).all()
    idents = batch["observation"][..., 0]
    for row in range(num_episodes):
        length = int(mask[row].sum())
        assert mask[row, :length].all()
        assert done[row, length - 1]
        assert batch["observation"][row, :length, 2].tolist() == list(range(length))
        assert len(set(idents[row, :length].tolist())) == 1
        assert len(set(batch["collector", "traj_ids"][row, :length].tolist())) == 1
        assert not batch["next", "reward"][row, length:].any()
    shares = [num_episodes // 3 + (i < num_episodes % 3) for i in range(3)]
    expected = [float(s % 65521) for s, n in zip(SEEDS.env_seeds(3), shares, strict=True) for _ in range(n)]
    assert idents[:, 0].tolist() == expected
    assert len(set(batch["collector", "traj_ids"][:, 0].tolist())) == num_episodes


@pytest.mark.parametrize(("length", "ended", "frames"), [(10**9, 0, 100), (5, 1, 9)])
def test_episodes_that_end_too_late_are_an_error(
    length: int, ended: int, frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cormorant_worker.collect.collector._LONGEST_SHARE", frames)
    collector = make_collector(num_envs=2, lengths=length)
    sentence = rf"environment 0 has ended {ended} of 2 episodes in {frames} frames; set "
    with pytest.raises(EnvError, match=sentence):
        collector.collect(num_episodes=3)


# At step 65 it comes with the first frame of the second chunk of 64: nothing is left to mark as truncated.
@pytest.mark.parametrize(("num_envs", "step", "length"), [(1, 65, 80), (2, 5, 10)])
def test_an_episode_that_a_crash_cut_short_does_not_count(num_envs: int, step: int, length: int) -> None:
    failures = [{"how": "raise", "step": step, "seeds": [SEEDS.env_seeds(num_envs)[0]]}]
    collector = make_collector(num_envs=num_envs, lengths=length, failures=failures)
    batch = collector.collect(num_episodes=2 * num_envs)
    assert collector.env_restarts == 1
    assert batch["collector", "mask"].all()
    assert batch["observation"][..., 2].tolist() == [[*range(length)]] * 2 * num_envs
    assert (batch["collector", "traj_ids"] == batch["collector", "traj_ids"][:, :1]).all()
    assert batch["next", "terminated"].sum() == 2 * num_envs
    assert not batch["next", "truncated"].any()


def test_environments_of_a_fleet_have_seeds_of_their_own() -> None:
    slots = [
        WorkerPlace(seed=3, index=index, attempt=attempt, group_number=group, num_groups=2)
        for group in range(2)
        for index in range(20)
        for attempt in range(4)
    ]
    epochs = [WorkerPlace(seed=3, index=index, epoch=epoch) for epoch in range(5) for index in range(50)]
    for paths, num_envs in ((slots, 64), (epochs, 16)):
        seeds = [seed for path in paths for seed in path.env_seeds(num_envs)]
        assert len(set(seeds)) == len(seeds)
        assert seeds == [seed for path in paths for seed in path.env_seeds(num_envs)]
        assert all(0 <= seed < 2**31 for seed in seeds)
        assert not set(seeds) & set(WorkerPlace(seed=4, index=0).env_seeds(8))
        assert len({path.seed_of("policy") for path in paths}) == len(paths)


def test_trajectory_ids_tell_slots_epochs_and_attempts_apart() -> None:
    def base(group: int = 0, index: int = 0, epoch: int = 0, attempt: int = 0, after: int = 0) -> int:
        numbers = {"group_number": group, "index": index, "epoch": epoch, "attempt": attempt, "num_groups": 8}
        return trajectory_base(WorkerPlace(seed=1, first_trajectory=after, **numbers))

    found = [
        base(group, index, epoch, attempt)
        for group in (0, 7)
        for index in (0, 1, 9_998, 16_383)
        for epoch in (0, 1, 4_095)
        for attempt in (0, 1, 511)
    ]
    assert found == sorted(set(found))
    assert found[-1] < 2**63
    assert (base(), base(attempt=2), base(epoch=1)) == (0, 2 << 24, 1 << 34)
    # Where predecessors got further, or attempts have no range of their own any more.
    assert base(attempt=1, after=(1 << 24) + 5) == (1 << 24) + 5
    assert base(attempt=2_000_000, epoch=3, after=(3 << 34) + 70) == (3 << 34) + 70
    for options, words in (({"index": 16_384}, "worker index 16384"), ({"epoch": 4_096}, "epoch 4096")):
        with pytest.raises(CormorantError, match=f"{words} does not fit a trajectory id: at most"):
            base(**options)


@pytest.mark.parametrize(
    ("index", "visible", "egl"),
    [(0, "", "0"), (3, "", "3"), (1, "4,6", "6"), (0, "GPU-8a6f,GPU-90c1", "0"), (2, "5", "2")],
)
def test_egl_counts_all_devices_of_the_machine(index: int, visible: str, egl: str) -> None:
    assert egl_device(index, visible=visible) == egl


def test_a_manifests_post_processing_is_what_collect_gives() -> None:
    asked = {"multiStep": {"steps": 2, "gamma": 0.5}, "splitTrajectories": True}
    with collector_of(make_job(num_envs=2, lengths=(4,), collection=asked)) as collector:
        batch = collector.collect(num_steps=12)
        assert batch.shape == (4, 4)
        assert batch["collector", "mask"].sum(-1).tolist() == [4, 2, 4, 2]
        # Rewards are 1, 2, 3, 4 in the first episode.
        assert batch["next", "reward"][0].flatten().tolist() == [2.0, 3.5, 5.0, 4.0]
        episodes = collector.collect(num_episodes=3)
        assert episodes["collector", "mask"].shape == (3, 4)
        assert episodes["steps_to_next_obs"].flatten().tolist() == [2, 2, 2, 1] * 3


# -- a look from outside ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_groups", [1, 2])
@pytest.mark.parametrize("observation", ["box", "image", "nested"])
def test_between_batches_it_is_what_the_next_one_begins_with(env_groups: int, observation: str) -> None:
    collector = make_collector(num_envs=3, env_groups=env_groups, lengths=(3, 5), observation=observation)
    block = Block(collector.layout(8))
    leaves = range(len(block.observation))
    for column, leaf in ((3, 0), (0, leaves.stop)):
        with pytest.raises(IndexError):
            collector.look(column, leaf)
    for size in (1, 7, 24, 3, 20):
        shown = [[collector.look(column, leaf) for leaf in leaves] for column in range(3)]
        collector.fill(block, size)
        for column, arrays in enumerate(shown):
            if block.lengths[column]:
                for array, stored in zip(arrays, block.observation, strict=True):
                    assert np.array_equal(array, stored[0, column])


def test_in_the_middle_of_a_batch_it_moves_with_the_environment() -> None:
    (env,) = envs = env_groups_of(2, 1, {"lengths": 1000})
    collector, steps, receive = make_collector(num_envs=2, envs=envs), list[float](), env.recv

    def recv() -> Step:
        steps.append(float(collector.look(1, 0)[2]))  # ident, episode, step, echo
        return receive()

    env.recv = recv
    collector.fill(Block(collector.layout(60)), 120)
    assert steps == [*range(60)]


# -- environments that come back in any order --------------------------------------------------------------------


def test_column_far_ahead_waits_and_the_ring_stays_bounded() -> None:
    # Rows 0 and 1 come 150 times before row 2 comes once: two must be under way, so they cannot wait for it.
    env = ArrivingEnv(3, cycle([0] * 450 + [2, 0, 0]), arrive=2, lengths=(4,))
    collector = make_collector(envs=[env])
    checker = make_checker(lengths=4)
    for _ in range(3):
        checker.take(collector.collect(num_steps=30))
    assert checker.frames == 3 * 30


@pytest.mark.parametrize("how", ["restore", "raise"])
def test_environments_in_flight_begin_new_episodes(how: str) -> None:
    """Only whole episodes count: nothing of one that was under way is handed over or reported."""
    generator = np.random.default_rng(1)
    env = ArrivingEnv(4, iter(lambda: int(generator.integers(0, 9)), -1), arrive=2, lengths=(7,))
    collector = make_collector(num_envs=4, envs=[env], policy="counter")
    before = collector.collect(num_steps=24)["collector", "traj_ids"].max()
    if how == "restore":
        collector.restore(collector.state())
    else:
        act, collector.actor.act = collector.actor.act, None  # type: ignore[method-assign]
        with pytest.raises(TypeError):
            collector.collect(num_steps=24)
        collector.actor.act = act  # type: ignore[method-assign]
    block = Block(collector.layout(10))
    assert collector.fill(block, 40).episodes.lengths == [7] * 4
    batch = to_tensordict(block)
    assert (batch["collector", "traj_ids"] > before).all()
    assert (batch["count"][..., 0] == torch.arange(10) % 7).all()


def test_an_onlooker_sees_where_each_environment_is() -> None:
    env = ArrivingEnv(3, cycle((0, 3, 1, 5, 2)), arrive=2, lengths=(5,))
    collector = make_collector(num_envs=3, envs=[env])
    block = Block(collector.layout(10))
    idents = [float(collector.look(column, 0)[0]) for column in range(3)]
    for _ in range(5):
        collector.fill(block, 30)
        for column, ident in enumerate(idents):
            shown, last = collector.look(column, 0), block.observation[0][9, column]
            assert shown[0] == ident == last[0]
            assert tuple(shown[1:3]) > tuple(last[1:3]), "ahead of what was handed over"
