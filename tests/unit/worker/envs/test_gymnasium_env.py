import warnings

import gymnasium
import pytest

from cormorant_testing.envs import CountingEnv
from cormorant_worker.envs.gymnasium_env import EnvFactory, MadeEnvs
from cormorant_worker.errors import EnvBuildError, UnknownEnv

COUNTING = "cormorant_testing.envs:make_counting"


LIMITED = {"entrypoint": "cormorant_testing.envs:make_limited", "kwargs": {"limit": 6, "lengths": 100}}


@pytest.mark.parametrize(
    ("factory", "limit", "steps"),
    [
        ({"id": "Pendulum-v1"}, 0, 200),
        ({"id": "Pendulum-v1"}, 3, 3),
        (LIMITED, 3, 3),
        (LIMITED, 9, 9),
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
        ({"entrypoint": "cormorant_testing.envs:make_countin"}, ["has no make_countin", "did you mean make_counting"]),
        ({"entrypoint": "cormorant_testing.envs"}, ["package.module:attribute"]),
        ({"entrypoint": "cormorant_testing.envs:ACTION_SPACES"}, ["is a dict", "callable"]),
        ({"entrypoint": "cormorant_testing.envs:make_nothing"}, ["NoneType", "gymnasium.Env"]),
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


@pytest.mark.parametrize(
    "space",
    [
        gymnasium.spaces.Box(0, 1, (0,)),
        gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(2), "b": gymnasium.spaces.Tuple(())}),
        gymnasium.spaces.MultiDiscrete([]),
    ],
    ids=str,
)
def test_a_space_without_values_is_refused_when_it_is_built(space: gymnasium.Space) -> None:
    class Empty(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = space

    with pytest.raises(EnvBuildError, match=r"at observation(\.b)? has no values; wrap the environment"):
        MadeEnvs([Empty]).build(0)
