"""Single environments: how they are built, restarted in this process, and saved."""

import json
import warnings
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import structlog
from gymnasium import spaces

from cormorant_testing.envs import CountingEnv
from cormorant_testing.vectors import COUNTING, counting, step_times
from cormorant_worker.envs.env_row import Crash, load_env, save_env
from cormorant_worker.envs.gymnasium_env import EnvFactory, MadeEnvs
from cormorant_worker.envs.restarts import RestartLimits, Restarts
from cormorant_worker.envs.single_envs import InlineVectorEnv
from cormorant_worker.errors import EnvBuildError, EnvCrashed, EnvNotSaved, StateError, UnknownEnv

SEEDS = [7, 70, 700]


def make(num_envs: int = 3, **options: object) -> InlineVectorEnv:
    return InlineVectorEnv(counting(**options), seeds=SEEDS[:num_envs])


def test_restarts_are_limited_within_ten_minutes() -> None:
    now = [0.0]
    restarts = Restarts([1], RestartLimits(total=2, inherited=1), clock=lambda: now[0])
    crash = Crash(row=0, what="raised ValueError: no", steps=5)
    restarts.record(crash, has_stepped=True)
    with pytest.raises(EnvCrashed, match="2 restarts within 10 minutes are the limit"):
        restarts.record(crash, has_stepped=True)
    now[0] = 600.0
    restarts.record(crash, has_stepped=True)
    restarts.record(crash, has_stepped=True)
    assert restarts.count == 3


def test_a_restart_has_a_seed_that_no_environment_had() -> None:
    crash = Crash(row=0, what="raised ValueError: no", steps=5)
    seed, again = (Restarts([1], RestartLimits()).record(crash, has_stepped=True) for _ in range(2))
    assert seed == again
    assert Restarts([1, seed], RestartLimits()).record(crash, has_stepped=True) not in (1, seed)


class Shown(gymnasium.Env[Any, Any]):
    """Shows what it is given, at every reset and step."""

    def __init__(self, space: gymnasium.Space[Any], shown: Any, reward: Any = 0.0) -> None:
        self.observation_space, self.action_space = space, spaces.Discrete(2)
        self._shown, self._reward = shown, reward

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._shown, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self._shown, self._reward, False, False, {}


def showing(space: gymnasium.Space[Any], shown: Any, reward: Any = 0.0) -> InlineVectorEnv:
    return InlineVectorEnv(MadeEnvs([lambda: Shown(space, shown, reward)]), seeds=[1])


PIXELS = spaces.Box(0, 255, (2,), np.uint8)


@pytest.mark.parametrize(
    ("space", "shown", "words"),
    [
        (PIXELS, np.array([7, 300]), r"300 \(int64\) would be stored as 44 \(uint8\)"),
        (PIXELS, np.array([7, 0.5]), r"0.5 \(float64\) would be stored as 0 \(uint8\)"),
        (spaces.Discrete(5), 1.7, r"1.7 \(float64\) would be stored as 1 \(int64\)"),
        (spaces.Dict({"a": spaces.MultiDiscrete([3, 3])}), {"a": [0.0, np.nan]}, r"nan \(float64\) would be stored as"),
    ],
)
def test_values_that_their_dtype_cannot_hold_are_refused(space: Any, shown: Any, words: str) -> None:
    with pytest.raises(EnvCrashed, match=words):
        showing(space, shown).start()


@pytest.mark.parametrize(
    ("space", "shown", "stored"),
    [
        (PIXELS, np.array([7.0, 255.0]), [7, 255]),
        (spaces.Discrete(5, dtype=np.int32), 3, 3),
        (spaces.MultiBinary(2), np.array([True, False]), [1, 0]),
        (spaces.Box(0, 1, (2,), np.float32), np.array([0.1, 1]), [np.float32(0.1), 1]),
    ],
)
def test_equal_values_of_other_dtypes_are_stored(space: Any, shown: Any, stored: Any) -> None:
    (found,) = showing(space, shown).start()
    assert found.dtype == space.dtype
    np.testing.assert_array_equal(found[0], stored)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (None, r"no reward \(None\) in step 1"),
        ([1, 2], r"\[1, 2\] as the reward in step 1 .*; return one number"),
        (np.ones(2), r"array\(\[1., 1.\]\) as the reward in step 1"),
        ("much", "'much' as the reward in step 1"),
    ],
)
def test_a_step_without_one_number_as_its_reward_is_refused(reward: Any, words: str) -> None:
    env = showing(spaces.Discrete(5), 3, reward)
    env.start()
    with pytest.raises(EnvCrashed, match=f"environment 0 returned {words}"):
        step_times(env, 1)


def test_the_first_restarts_are_logged_with_their_traceback() -> None:
    env = make(1, failures=[{"step": 2, "words": "every second step"}], lengths=100)
    env.start()
    with structlog.testing.capture_logs() as logged:
        step_times(env, 10)
    assert [(line["event"], line["restarts"], line["most_restarts"]) for line in logged] == [
        ("env_restarted", n, 100) for n in range(1, 6)
    ]
    assert ["ValueError: every second step" in line.get("exception", "") for line in logged] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("others", [0, 2])
def test_an_error_says_whether_any_environment_ever_stepped(others: int) -> None:
    broken = partial(CountingEnv, failures=[{"step": 1}])
    env = InlineVectorEnv(MadeEnvs([broken, *[CountingEnv] * others]), seeds=SEEDS[: 1 + others])
    env.start()
    with pytest.raises(EnvCrashed, match="restarted 3 times without completing a step") as caught:
        step_times(env, 9)
    assert caught.value.has_stepped == (others > 0)


def test_a_state_of_other_environments_is_refused() -> None:
    with pytest.raises(StateError, match="has 3 environments, this collector has 2"):
        make(2).restore(make(3).state())
    with pytest.raises(StateError, match="not a state of gymnasium environments"):
        make().restore(b"{}")


def test_a_close_that_raises_leaves_no_other_environment_open() -> None:
    class Stubborn(Shown):
        def close(self) -> None:
            raise OSError("the window is gone")

    env = InlineVectorEnv(MadeEnvs([lambda: Stubborn(PIXELS, 0)] * 3), seeds=SEEDS)
    with structlog.testing.capture_logs() as logged:
        env.close()
    assert [(line["event"], line["env"]) for line in logged] == [("env_close_failed", i) for i in range(3)]


LIMITED = {"entrypoint": "gymnasium:make", "kwargs": {"id": "Pendulum-v1"}}


@pytest.mark.parametrize(
    ("factory", "limit", "steps"),
    [
        ({"id": "Pendulum-v1"}, 0, 200),
        ({"id": "Pendulum-v1"}, 3, 3),
        (LIMITED, 3, 3),
        (LIMITED, 300, 300),
        ({"entrypoint": COUNTING, "kwargs": {"lengths": 100}}, 4, 4),
    ],
)
def test_max_episode_steps_replaces_an_environments_own_limit(factory: dict, limit: int, steps: int) -> None:
    env = EnvFactory(**factory, max_episode_steps=limit).build()
    env.reset(seed=1)
    assert next(n for n in range(1, 1000) if env.step(env.action_space.sample())[3]) == steps


def test_wrappers_are_applied_from_the_inside_out() -> None:
    env = EnvFactory(
        entrypoint=COUNTING,
        wrappers=(
            ("cormorant_testing.envs:Stateless", {}),
            ("cormorant_testing.envs:Stateless", {"bonus": 2.5}),
            ("gymnasium.wrappers:TimeLimit", {"max_episode_steps": 2}),
        ),
    ).build()
    assert isinstance(env, gymnasium.wrappers.TimeLimit)
    assert (env.env.bonus, env.env.env.bonus) == (2.5, 0.0)
    env.reset(seed=1)
    assert env.step(0)[1] == 1 + 2.5


def test_gymnasiums_warnings_are_not_shown() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        EnvFactory(id="CartPole-v0").build()  # out of date
        EnvFactory(id="CartPole").build()  # without a version
    assert shown == []


@pytest.mark.parametrize(
    ("env_id", "words"), [("cartpol-v1", "Did you mean: `CartPole`"), ("Xyzzy", "Xyzzy.*ale_py:ALE/Pong-v5")]
)
def test_an_unknown_id_is_refused_with_near_matches(env_id: str, words: str) -> None:
    with pytest.raises(UnknownEnv, match=words):
        EnvFactory(id=env_id).build()


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ({"entrypoint": "no_such_package:make"}, ["no_such_package", "PYTHONPATH"]),
        ({"entrypoint": "cormorant_testing.envs:CountingEn"}, ["has no attribute 'CountingEn'"]),
        ({"entrypoint": "cormorant_testing.envs"}, ["package.module:attribute"]),
        ({"entrypoint": "cormorant_testing.envs:ACTION_SPACES"}, ["is a dict", "callable"]),
        ({"entrypoint": "builtins:print"}, ["NoneType", "gymnasium.Env"]),
        ({"entrypoint": COUNTING, "kwargs": {"failures": [{"at": "init"}]}}, ["ValueError: told to fail"]),
        ({"id": "CartPole-v1", "kwargs": {"gravity": 3}}, ["CartPole-v1", "gravity"]),
        (
            {"entrypoint": COUNTING, "wrappers": (("gymnasium.wrappers:TimeLimit", {}),)},
            ["wrapper", "max_episode_steps"],
        ),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_sentence(factory: dict, words: list[str]) -> None:
    with pytest.raises(EnvBuildError) as caught:
        EnvFactory(**factory).build()
    for word in words:
        assert word in str(caught.value)
    if "told to fail" in words[0]:
        assert isinstance(caught.value.__cause__, ValueError), "its traceback is kept"


NOTHING, SHAPE = "has no values; wrap the environment", "observation.said has no fixed shape"


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        (spaces.Box(0, 1, (0,)), f"at observation {NOTHING}"),
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple(())}), f"at observation.b {NOTHING}"),
        (spaces.MultiDiscrete([]), f"at observation {NOTHING}"),
        (spaces.Dict(said=spaces.Text(5)), f"{SHAPE}.*encode it as one of them, padded to a fixed length"),
    ],
)
def test_a_space_that_cannot_be_stored_is_refused_when_it_is_built(space: Any, sentence: str) -> None:
    with pytest.raises(EnvBuildError, match=sentence):
        MadeEnvs([lambda: Shown(space, None)]).build(0)


class Keeper(CountingEnv):
    kept: object = None

    def get_state(self):
        return {"kept": self.kept}

    def set_state(self, state):
        self.kept = state["kept"]


@pytest.mark.parametrize(
    "value",
    [
        None, True, 2**80, 0.1, float("inf"), b"\x00\xff", (1, (2.5, "x")), {"a": {1: (2,)}}, np.float32(0.1),
        np.arange(6, dtype=np.uint8).reshape(2, 3), np.array(1.5), np.empty((0, 3), np.float32),
        np.random.default_rng(3).bit_generator.state,
    ],
)  # fmt: skip
def test_plain_values_come_back_as_they_were(value: object) -> None:
    one, other = Keeper(), Keeper()
    one.kept = value
    load_env(other, json.loads(json.dumps(save_env(one))))
    assert type(other.kept) is type(value)
    if isinstance(value, np.ndarray):
        np.testing.assert_array_equal(other.kept, value, strict=True)
    else:
        assert other.kept == value


def make_wrapped() -> gymnasium.Env:
    wrappers = gymnasium.wrappers
    env = wrappers.RecordEpisodeStatistics(wrappers.TimeLimit(wrappers.OrderEnforcing(CountingEnv(lengths=(5, 9))), 7))
    env = wrappers.FrameStackObservation(wrappers.TimeAwareObservation(env), 3)
    env = wrappers.NormalizeReward(wrappers.NormalizeObservation(wrappers.FlattenObservation(env)))
    return wrappers.ClipReward(env, -5.0, 5.0)


def play(env: gymnasium.Env, steps: int) -> list:
    found = []
    for i in range(steps):
        obs, reward, terminated, truncated, info = env.step(i % 2)
        episode = info.get("episode", {})
        found.append((obs.tolist(), float(reward), terminated, truncated, episode.get("r"), episode.get("l")))
        if terminated or truncated:
            found.append(env.reset()[0].tolist())
    return found


def test_gymnasiums_own_wrappers_are_saved() -> None:
    one, other, new = make_wrapped(), make_wrapped(), make_wrapped()
    for env in (one, other):
        env.reset(seed=5)
    play(one, 17)
    saved = json.dumps(save_env(one))
    play(other, 30)
    for env in (other, new):
        load_env(env, json.loads(saved))
    assert play(one, 25) == play(other, 25) == play(new, 25)
    with pytest.raises(StateError, match="a state of 10 layers does not fit an environment of 1 layers"):
        load_env(Keeper(), json.loads(saved))


def test_other_values_are_refused_by_name() -> None:
    with pytest.raises(EnvNotSaved, match=r"^TransformReward has no get_state"):
        save_env(gymnasium.wrappers.TransformReward(Keeper(), float))  # the function may keep something
    env = Keeper()
    env.kept = object()
    with pytest.raises(StateError, match="returned a object"):
        save_env(env)
