"""Gymnasium vector environments, frame by frame against plain loops over single ones, and what they do wrong."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from cormorant_testing.envs import CountingEnv, Masked
from cormorant_testing.placements import echo_env
from cormorant_testing.placements.echo_env import EchoEnv
from cormorant_testing.placements.echo_torch import TorchEchoes, WholeTorchEchoes
from cormorant_testing.vectors import step_times, transitions
from cormorant_worker.envs import flat_vector
from cormorant_worker.envs.flat_vector import VectorSource
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.single_envs import OneRow
from cormorant_worker.envs.vector import GymVectorEnv
from cormorant_worker.errors import EnvBuildError, EnvCrashed, EnvError, ManifestError
from cormorant_worker.launch import make_collector

N = 4
SEEDS = (11, 22, 33, 44)
INFO = (InfoField(key="echo", dtype="float32", shape=()), InfoField(key="won", dtype="bool", shape=(), fill=0))
MODES = [mode.value for mode in AutoresetMode]


def made(make: Callable[..., Any], **kwargs: Any) -> GymVectorEnv:
    return GymVectorEnv(VectorSource("test", make), seeds=SEEDS, **kwargs)


def echoes(num_envs: int, *, kind: Any = SyncVectorEnv, env: Any = EchoEnv, **kwargs: Any) -> Any:
    return kind([env] * num_envs, **kwargs)


def play(env: Any, steps: int) -> list[list[tuple[Any, ...]]]:
    return transitions(env, np.random.default_rng(3).uniform(-1, 1, (steps, env.num_envs, 2)).astype(np.float32))


def reference(frames: list[tuple[Any, ...]], seed: int) -> list[tuple[Any, ...]]:
    """What a single environment gives for the same actions."""
    env, found = EchoEnv(), []
    obs, _ = env.reset(seed=seed)
    for frame in frames:
        after, reward, terminated, truncated, info = env.step(frame[1])
        found.append(
            (obs, frame[1], np.float32(reward), terminated, truncated, after, info["echo"], info.get("won", 0))
        )
        obs = env.reset()[0] if terminated or truncated else after
    return found


def assert_frames(env: Any, steps: int, seeds: Sequence[int] = SEEDS) -> None:
    for row, frames in enumerate(play(env, steps)):
        for found, wanted in zip(frames, reference(frames, seeds[row]), strict=True):
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(a, b)


class Own(SyncVectorEnv):
    """Resets rows itself, and leaves alone which of them its next step would reset."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        rows = np.flatnonzero((options or {}).get("reset_mask", np.ones(self.num_envs, bool)))
        for row in rows:
            self._env_obs[row], _ = self.envs[row].reset(seed=None if seed is None else seed[row])
        return np.stack(self._env_obs), {}


@pytest.mark.parametrize(
    "kind",
    [
        SyncVectorEnv, partial(SyncVectorEnv, copy=False), AsyncVectorEnv, partial(AsyncVectorEnv, copy=False),
        partial(AsyncVectorEnv, shared_memory=False), TorchEchoes, Own,
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_frames_are_those_of_single_environments(kind: Any, mode: str) -> None:
    with closing(made(partial(echoes, kind=kind, autoreset_mode=mode), info=INFO)) as env:
        for _ in range(2):
            assert_frames(env, 30)


@pytest.mark.parametrize("kind", [SyncVectorEnv, WholeTorchEchoes])
def test_frames_of_many_rows_some_of_which_always_end(kind: Any) -> None:
    seeds = range(11, 51)
    with closing(GymVectorEnv(VectorSource("test", partial(echoes, kind=kind)), seeds=seeds, info=INFO)) as env:
        assert env.lockstep == (kind is SyncVectorEnv)
        assert_frames(env, 12, seeds)


class Brief(EchoEnv):
    """Every episode has one step, but for the first one of an even seed."""

    def step(self, action: Any) -> Any:
        obs, reward, *_, info = super().step(action)
        return obs, reward, bool(self._episode or self._ident % 2), False, info


def test_resets_that_stay_pending_forever_are_refused() -> None:
    with closing(made(partial(echoes, kind=partial(AsyncVectorEnv, shared_memory=False), env=Brief))) as env:
        env.start()
        step_times(env, 1)
        with pytest.raises(EnvBuildError, match=r"no step can be told from a reset; make it with .*shared_memory=True"):
            env.start()


class Batched(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Counts steps of episodes of 3 to 6 steps: observation [row, episode, step]; action 1 counts twice."""

    metadata: dict[str, Any] = {}  # noqa: RUF012 - as gymnasium has it

    def __init__(
        self, num_envs: int, *, mode: str = "", does: str = "", final: str = "array", dtype: Any = np.float32
    ) -> None:
        self.num_envs, self._final, self._dtype = num_envs, final, dtype
        self.metadata = {"autoreset_mode": mode} if mode else {}
        self._does = does or mode or "SameStep"
        low, high = (-np.inf, np.inf) if np.dtype(dtype).kind == "f" else (0, 100)
        self.single_observation_space = gymnasium.spaces.Box(low, high, (3,), dtype)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.buffer = np.zeros((num_envs, 3), dtype)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.buffer[:] = np.arange(self.num_envs)[:, None] * [1, 0, 0]
        self.over = np.zeros(self.num_envs, bool)
        return self.buffer.copy(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        resets = self.over & (self._does == "NextStep")
        self.buffer[:, 2] += np.where(resets, 0, 1 + actions).astype(self._dtype)
        self._begin(resets)
        self.over = (self.buffer[:, 2] >= 3 + self.buffer[:, 0] % 4) & ~resets
        info: dict[str, Any] = {}
        if self._does == "SameStep" and self.over.any():
            last = self.buffer if self._final == "alias" else self.buffer.copy()
            self._begin(self.over)
            if self._final == "object":  # each row returned the object that its reset has overwritten
                info["final_obs"] = np.array([*self.buffer, None], object)[:-1]
            elif self._final:
                info["final_obs"] = last
        obs = self.buffer if self._final == "alias" else self.buffer.copy()
        return obs, np.where(resets, 0.0, 1.0), self.over.copy(), np.zeros(self.num_envs, bool), info

    def _begin(self, rows: Any) -> None:
        self.buffer[rows, 1] += 1
        self.buffer[rows, 2] = 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"mode": "SameStep", "final": "alias"}, "in the memory of the observations"),
        ({"mode": "SameStep", "final": "object"}, "equals the first observation of the next episode"),
        ({"mode": "SameStep", "final": "object", "dtype": np.uint8}, "equals the first observation of the next"),
        ({"mode": "SameStep", "final": ""}, 'gives no info."final_obs".*compute_final_obs=True'),
        ({"mode": "NextStep", "does": "Disabled"}, "NEXT_STEP, and the step after an end had a reward or ended"),
    ],
)
def test_ends_that_are_not_as_declared_are_refused(arguments: Mapping[str, Any], sentence: str) -> None:
    env = made(partial(Batched, **arguments))
    env.start()
    with pytest.raises(EnvCrashed, match=sentence):
        step_times(env, 20)


class ReusingEnv(EchoEnv):
    """Returns the same object at every step and reset."""

    kept: Any = None

    def _observe(self, *action: float) -> Any:
        self.kept = np.empty(5, np.float32) if self.kept is None else self.kept
        self.kept[:] = super()._observe(*action)
        return self.kept


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", MODES)
def test_environments_that_return_one_object(kind: Any, mode: str) -> None:
    with closing(made(partial(echoes, kind=kind, env=ReusingEnv, autoreset_mode=mode), info=INFO)) as env:
        if mode == "SameStep":
            with pytest.raises(EnvCrashed, match="make it with autoreset_mode NEXT_STEP"):
                play(env, 20)
            return
        assert_frames(env, 20)


@pytest.mark.parametrize("does", ["NextStep", "SameStep"])
def test_modes_that_are_not_declared_are_found_by_playing(does: str) -> None:
    assert made(partial(Batched, does=does))._mode.value == does


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"does": "SameStep", "final": ""}, "declares no autoreset_mode.*gives no final_obs, and the step"),
        ({"does": "Disabled"}, "declares no autoreset_mode.*is not seen to be a reset"),
        ({"does": "NextStep", "mode": "sometimes"}, "declares the autoreset_mode 'sometimes'; known: NEXT_STEP"),
        ({"does": "Disabled", "mode": "Disabled"}, "does not reset the rows of the mask alone: it resets every row"),
    ],
)
def test_modes_that_cannot_be_told_are_refused(arguments: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(EnvBuildError, match=sentence):
        made(partial(Batched, **arguments))


def test_a_mode_that_another_class_declared_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """ALE's environment writes its mode into the dict that gymnasium's base class has for all."""
    monkeypatch.setitem(gymnasium.vector.VectorEnv.metadata, "autoreset_mode", AutoresetMode.DISABLED)

    def make(num_envs: int) -> Any:
        env = Batched(num_envs)
        env.metadata = gymnasium.vector.VectorEnv.metadata
        return env

    assert made(make)._mode is AutoresetMode.SAME_STEP


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (lambda num_envs: EchoEnv(), "has no num_envs, single_observation_space.*return a gymnasium.vector.VectorEnv"),
        (lambda num_envs: echoes(3), "called with num_envs=8 and has 3 environments; pass num_envs on"),
        ({"vector": {"id": "CartPol-v1", "numEnvs": 8}}, "could not be built: .*Did you mean: `CartPole`"),
        ({"vector": {"entrypoint": "my_envs:make", "numEnvs": 8}}, "my_envs"),
    ],
)
def test_what_is_no_vector_environment_is_refused(env: Any, sentence: str) -> None:
    with pytest.raises((EnvBuildError, ManifestError, RuntimeError), match=sentence):
        make_collector(env=env)


@pytest.mark.parametrize(
    ("env", "num_envs"),
    [
        (partial(gymnasium.make_vec, "CartPole-v1", num_envs=5), None),
        (lambda num_envs, more=1: echoes(num_envs), 3),
    ],
)
def test_a_function_that_takes_num_envs_makes_a_vector_environment(env: Any, num_envs: int | None) -> None:
    with make_collector(env=env, num_envs=num_envs) as collector:
        assert collector.collect(num_steps=30).batch_size[0] == (num_envs or 5)


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize(("at", "where"), [("reset", "a reset"), ("step", "step 1")])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_first_error_is_told(kind: Any, at: str, where: str) -> None:
    env = partial(CountingEnv, failures=[{"at": at}])
    with pytest.raises(EnvCrashed, match=f"raised ValueError in {where}: told to fail; fix the environment"):
        make_collector(env=partial(echoes, kind=kind, env=env), num_envs=2).collect(num_steps=2)


class Told(SyncVectorEnv):
    """Says something of all environments at once, as simulators do."""

    def step(self, actions: Any) -> Any:
        *step, info = super().step(actions)
        return (*step, info | {"fps": 30, "log": {"loss": 0.5, "of": np.array([7])}})


def test_infos_of_all_rows_are_those_of_one() -> None:
    source = VectorSource("test", partial(echoes, kind=Told))
    row = OneRow(GymVectorEnv(source, seeds=(0,), info=[InfoField(key="log.of")]))
    row.reset(seed=1)
    *_, info = row.step(np.zeros(2, np.float32))
    row.close()
    assert info == {"log.of": 7}


def test_an_info_of_all_environments_at_once_is_refused() -> None:
    with pytest.raises(EnvError, match=r"fps in info of shape \(\) for 2 environments"):
        make_collector(env=partial(echoes, kind=Told), num_envs=2, info=["fps"])


@pytest.mark.parametrize("collection", [{"resetAtEachBatch": True}, {"maxFramesPerTrajectory": 5}])
def test_what_needs_rows_to_be_reset_alone_is_refused(collection: Mapping[str, Any]) -> None:
    (field,) = collection
    with pytest.raises(ManifestError, match=f"spec.collection.{field} needs rows of .* to be reset alone"):
        make_collector(env=partial(Batched, mode="NextStep"), num_envs=N, collection=collection)


def test_rows_that_were_left_out_begin_new_episodes() -> None:
    """A short batch steps a part of the rows, and a vector environment steps all of them."""
    with make_collector(env=partial(echoes, autoreset_mode="NextStep"), num_envs=N) as collector:
        collector.collect(num_steps=N + 1)
        ids = collector.trajectories.ids.copy()
        batch = collector.collect(num_steps=2 * N)
    np.testing.assert_array_equal(batch["collector", "traj_ids"][1:, 0] > ids.max(), [True] * 3)
    assert not batch["observation"][1:, 0, 2:].any()
    assert batch["collector", "traj_ids"][0, 0] == ids[0]


@pytest.mark.parametrize("mode", ["next", "same", "disabled", "held"])
def test_rows_of_one_play_as_single_environments(mode: str) -> None:
    """What evaluations step: an episode depends on its seed alone."""
    source, single = VectorSource("test", partial(echo_env.make_vector, mode=mode)), EchoEnv()
    with closing(OneRow(GymVectorEnv(source, seeds=(0,)))) as row:
        for seed in (5, 6, 7):
            (found, _), (wanted, _), is_over = row.reset(seed=seed), single.reset(seed=seed), False
            while not is_over:
                np.testing.assert_array_equal(found, wanted)
                action = np.full(2, found[2], np.float32)
                (found, reward, *flags, info), (wanted, *others) = row.step(action), single.step(action)
                assert (reward, *flags, info) == (np.float32(others[0]), *others[1:-1], {})
                is_over = any(flags)
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("kind", "in_info"), [(SyncVectorEnv, False), (SyncVectorEnv, True), (TorchEchoes, False)])
def test_rows_are_tried_and_left_out_within_their_masks(kind: Any, in_info: bool) -> None:
    make = partial(echoes, kind=kind, env=partial(Masked, in_info=in_info), autoreset_mode="SameStep")
    policy = None if in_info else lambda seen: seen["action_mask"].argmax(-1) + 10
    with make_collector(env=make, policy=policy, num_envs=N, info=["chosen"]) as collector:
        for frames in (N + 1, 3 * N, 1):  # every row but the first is stepped once more in the first batch
            collector.collect(num_steps=frames)


class Misfit(Batched):
    """Gives something else in some places of a step's result; nothing: it raises."""

    def __init__(self, num_envs: int, *, gives: Mapping[int, Any]) -> None:
        super().__init__(num_envs, mode="SameStep")
        self._gives = gives

    def step(self, actions: Any) -> Any:
        if not self._gives:
            raise OSError("the simulator died")
        return tuple(self._gives.get(i, part) for i, part in enumerate(super().step(actions)))


@pytest.mark.parametrize(
    ("gives", "sentence"),
    [
        ({0: np.full((N, 3), [[0], [0], [np.nan], [0]], np.float32)}, "environment 2 returned NaN in observation"),
        ({1: np.array([1, np.nan, 1, 1])}, "environment 1 returned a NaN reward in step"),
        ({0: np.zeros((3, 3), np.float32)}, r"of shape \(3, 3\); 4 environments and their space say \(4, 3\)"),
        ({1: 1.0}, r"reward of shape \(\) for 4 environments"),
        ({1: ["much"] * N}, "reward that is not an array of numbers"),
        ({4: []}, "list as info; return a dict"),
        ({}, "test raised OSError in step .*: the simulator died; fix the environment"),
    ],
)
def test_what_does_not_fit_is_refused(gives: Mapping[int, Any], sentence: str) -> None:
    env = made(partial(Misfit, gives=gives))
    env.start()
    with pytest.raises(EnvCrashed, match=sentence):
        step_times(env, 1)


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv, TorchEchoes])
@pytest.mark.parametrize("mode", MODES)
def test_nested_observations(kind: Any, mode: str) -> None:
    nested = partial(CountingEnv, observation="nested")
    with closing(made(partial(echoes, kind=kind, env=nested, autoreset_mode=mode))) as env:
        env.start()
        for _ in range(30):
            step = step_times(env, 1)
            for (_, steps, _, counts), positions in ((step.obs, np.arange(N)), (step.final, step.ended)):
                np.testing.assert_array_equal(counts[:, 2], steps)
                assert len(steps) == len(positions)
            assert not step.obs[1][step.ended].any()
            assert step.final[1].all()


def test_a_process_that_is_killed_ends_its_vector_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_vector, "STEP_LIMIT_S", 0.5)
    env = made(partial(echoes, kind=AsyncVectorEnv))
    env.start()
    step_times(env, 3)
    env.env.processes[1].kill()
    with pytest.raises(EnvCrashed, match=r"raised (Timeout|ConnectionReset|BrokenPipe|EOF)Error in step") as crashed:
        step_times(env, 3)
    assert crashed.value.has_stepped
    env.close()


@pytest.mark.parametrize("mode", MODES)
def test_whole_episodes_are_collected(mode: str) -> None:
    with make_collector(env=partial(echoes, autoreset_mode=mode), num_envs=N) as collector:
        for _ in range(2):
            batch = collector.collect(num_episodes=2 * N + 1)
            mask = batch["collector", "mask"]
            assert batch.shape[0] == 2 * N + 1
            assert not batch["observation"][:, 0, 2:].any()
            last = mask.sum(1) - 1
            assert batch["next", "done"][np.arange(2 * N + 1), last].all()
            final = batch["next", "observation"][np.arange(2 * N + 1), last]  # of its own row and episode
            np.testing.assert_array_equal(final[:, :2], batch["observation"][:, 0, :2])
            assert int(batch["next", "done"][mask].sum()) == 2 * N + 1


SHORT = {"max_num_frames_per_episode": 60, "noop_max": 30, "frameskip": 4}
LIVES = InfoField(key="episode_frame_number", dtype="int64", shape=(), fill=-1)


BUTTONS = np.random.default_rng(1).integers(0, 4, (60, N))


def play_ale(row: int) -> list[tuple[Any, ...]]:
    """A loop over one row, which drops the step after an end."""
    from ale_py.vector_env import AtariVectorEnv

    env, frames = AtariVectorEnv("breakout", 1, autoreset_mode="NextStep", **SHORT), []
    obs, _ = env.reset(seed=np.array([SEEDS[row]]))
    for action in BUTTONS[:, row]:
        obs = obs.copy()
        after, reward, terminated, truncated, info = env.step(np.array([action]))
        flags = bool(terminated[0]), bool(truncated[0])
        frames.append((obs[0], float(reward[0]), *flags, after[0].copy(), int(info["episode_frame_number"][0])))
        obs = env.step(np.array([0]))[0] if any(flags) else after
    return frames


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_frames_of_ale_are_those_of_single_rows(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # It registers its games when it is imported, which other tests must not see.
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    from ale_py.vector_env import AtariVectorEnv

    kwargs = {"game": "breakout", "autoreset_mode": mode, **SHORT}
    source = VectorSource("ale", partial(AtariVectorEnv, **kwargs))
    env = GymVectorEnv(source, seeds=SEEDS, info=[LIVES])
    assert env.lockstep
    found, ends = transitions(env, BUTTONS), 0
    env.close()
    for row, frames in enumerate(found):
        for t, (frame, (before, reward, *flags, after, number)) in enumerate(zip(frames, play_ale(row), strict=True)):
            ends += any(flags)
            # ALE gives no info of a step that it resets in.
            told = LIVES.fill if any(flags) and mode == "SameStep" else number
            wanted = before, BUTTONS[t, row], reward, *flags, after, told
            for a, b in zip(frame, wanted, strict=True):
                np.testing.assert_array_equal(a, b, f"row {row}, step {t}")
    assert ends >= 2 * N
