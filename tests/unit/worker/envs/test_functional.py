"""Functional environments, frame by frame against plain loops over the raw functions, and what is refused."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cormorant_contract.env import Env
from cormorant_testing.functional import Ball, CartPole, Walk, brax, gymnax, jumanji, plain
from cormorant_testing.vectors import transitions
from cormorant_worker.envs.gymnasium_env import form_of
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.kinds import kind_of
from cormorant_worker.envs.protocol import EVERY_ROW
from cormorant_worker.envs.request import EnvRequest
from cormorant_worker.errors import EnvBuildError, EnvCrashed, StateError
from cormorant_worker.launch import make_collector
from cormorant_worker.scripted import Scripted

N, STEPS = 6, 24


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiling is nearly all that these tests do, and most of them, and of later ones, compile what others have."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("jax")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


SEEDS = tuple(range(100, 100 + N))


def opened(env: Any = None, *, limit: int = 0, info: Any = None, **made: Any) -> Any:
    spec = {"jax": {"entrypoint": "a:b", "numEnvs": N, **made}, "maxEpisodeSteps": limit}
    block, makers = Env.model_validate(spec | ({"info": info} if info else {})), () if made else (lambda: env,)
    request = EnvRequest(env=block, seeds_of=lambda num_envs: SEEDS[:num_envs], makers=makers)
    return kind_of(block).open_envs(request).groups[0]


FORMS = {"gymnax": (CartPole(), gymnax, "angle"), "brax": (Ball(), brax, "speed"), "jumanji": (Walk(), jumanji, "at")}


def draw(env: Any) -> Any:
    env.action_space.seed(3)
    drawn = [[env.action_space.sample() for _ in range(N)] for _ in range(STEPS)]
    return np.asarray(drawn)


def played(env: Any, actions: Any) -> list[Any]:
    frames = []
    for chosen in actions:
        env.send((chosen,), EVERY_ROW)
        step = env.recv()
        frames += [*(leaf.copy() for leaf in (*step.obs, *step.final)), step.reward.copy()]
    return frames


def assert_plain(env: Any, functions: Any, *, limit: int, tolerance: float, knows_info: bool) -> list[tuple[Any, Any]]:
    """Every frame is that of a loop over the raw functions. The flags of all."""
    actions, flags = draw(env), []
    for row, frames in enumerate(transitions(env, actions)):
        wanted = plain(functions, SEEDS[row], actions[:, row], limit)
        for t, (found, (before, reward, terminated, truncated, following, told)) in enumerate(
            zip(frames, wanted, strict=True)
        ):
            info = (told,) if knows_info else ()
            expected = *before, actions[t, row], reward, terminated, truncated, *following, *info
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
            flags.append((terminated, truncated and not terminated))
    return flags


@pytest.mark.parametrize(("form", "limit"), [*((form, 0) for form in FORMS), ("gymnax", 5)])
def test_frames_are_those_of_a_loop_over_the_raw_functions(form: str, limit: int) -> None:
    raw, functions, key = FORMS[form]
    env = opened(raw, limit=limit, info=[{"key": key}])
    flags = assert_plain(env, functions(raw), limit=limit, tolerance=2e-6, knows_info=True)
    assert np.array(flags).any(axis=0).all(), "episodes ended both ways"


POLE = {"env_name": "inverted_pendulum", "backend": "spring", "auto_reset": False, "episode_length": 15}


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("entrypoint", "kwargs", "limit", "functions"),
    [
        ("gymnax:make", {"env_id": "CartPole-v1"}, 20, lambda made: gymnax(made[0])),
        ("gymnax:make", {"env_id": "MountainCar-v0"}, 15, lambda made: gymnax(made[0])),
        ("jumanji:make", {"id": "Snake-v1"}, 20, jumanji),
        ("brax.envs:create", POLE, 0, brax),
    ],
    ids=["cartpole", "mountain-car", "snake", "pendulum"],
)
def test_frames_are_those_of_the_library(entrypoint: str, kwargs: Any, limit: int, functions: Any) -> None:
    """gymnax, Brax and jumanji themselves: `make test-jax`."""
    module, _, name = entrypoint.partition(":")
    pytest.importorskip(module.partition(".")[0])
    env = opened(limit=limit, entrypoint=entrypoint, kwargs=kwargs)
    raw = functions(getattr(import_module(module), name)(**kwargs))
    assert any(map(any, assert_plain(env, raw, limit=limit, tolerance=1e-4, knows_info=False)))


@pytest.mark.parametrize(
    "form", ["gymnax", *(pytest.param(form, marks=pytest.mark.slow) for form in ("brax", "jumanji"))]
)
def test_a_restored_vector_goes_on_bit_by_bit(form: str) -> None:
    env, other = opened(FORMS[form][0]), opened(FORMS[form][0])
    actions = draw(env)
    env.start()

    played(env, actions)
    state = env.state()
    wanted = played(env, actions)
    other.restore(state)
    for a, b in zip(played(other, actions), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(StateError, match="not a state of functional"):
        env.restore(b"nothing")
    foreign = opened(Walk() if form != "jumanji" else Ball())
    with pytest.raises(StateError, match=f"not of {N} rows"):
        foreign.restore(state)


def test_rows_that_are_not_sent_stay_and_rows_that_are_restarted_begin_anew() -> None:
    env = opened(CartPole())
    actions, some = draw(env), np.array([1, 3])
    first = env.start()[0].copy()
    wanted = played(env, actions[:4])[0::3]
    env.start()
    for t in range(4):
        env.send((actions[t][some],), some)
        np.testing.assert_array_equal(env.recv().obs[0], wanted[t][some])
    env.send((actions[0],), EVERY_ROW)
    left = np.setdiff1d(np.arange(N), some)
    np.testing.assert_array_equal(env.recv().obs[0][left], wanted[0][left])
    begun = env.restart(some)[0]
    assert not np.isin(begun, first).any()
    assert (np.abs(begun) <= 0.15).all()


@pytest.mark.parametrize(
    "env",
    [Ball, Ball(), (CartPole(), CartPole.default_params)],
    ids=["class", "environment", "with parameters"],
)
def test_scripts_pass_functional_environments(env: Any) -> None:
    scripted = Scripted(env=env, num_envs=3)
    block, (maker,) = scripted.job().spec.env, scripted.overrides().envs
    assert (block.block.kind, block.num_envs, bool(form_of(maker()))) == ("jax", 3, True)


def test_a_manifest_collects_from_an_entrypoint() -> None:
    spec = {"jax": {"entrypoint": "cormorant_testing.functional:make", "numEnvs": 3, "kwargs": {"force": 30.0}}}
    collector = make_collector(env=spec, seed=4)
    batch = collector.collect(num_steps=60)
    collector.close()
    terminated, truncated = (batch["next", name].squeeze(-1) for name in ("terminated", "truncated"))
    assert (batch["next", "observation"][..., 2].abs()[terminated] > 0.2095).all()
    assert (batch["next", "observation"][..., 2].abs()[~terminated] <= 0.2095).all()
    assert terminated.any()
    assert (truncated | terminated).sum() >= 6


class Shaped(CartPole):
    def __init__(self, dtype: Any) -> None:
        self._dtype = dtype

    def reset(self, key: Any, params: Any) -> Any:
        obs, state = super().reset(key, params)
        return obs.astype(self._dtype), state


class AutoResetWrapper:
    def __init__(self, env: Any) -> None:
        self.env = env

    action_size, observation_size, reset, step = 2, 3, Ball.reset, Ball.step


class Broken(CartPole):
    def reset(self, key: Any, params: Any) -> Any:
        raise ValueError("no table")


class Parts(CartPole):
    def action_space(self, params: Any) -> Any:
        return {"left": 1, "right": 2}


class Purse(CartPole):
    """Begins with whole numbers, and with a typed key."""

    def reset(self, key: Any, params: Any) -> Any:
        return jnp.zeros(1, jnp.int32), {"total": 0, "spent": 0, "key": jax.random.key(key[0])}

    def step_env(self, key: Any, state: Any, action: Any, params: Any) -> Any:
        own, now = jax.random.split(state["key"])
        total, spent = state["total"] + 0.5 + jax.random.uniform(now), state["spent"] + state["total"]
        return jnp.array([total]), {"total": total, "spent": spent, "key": own}, spent, False, {}

    def is_truncated(self, state: Any, params: Any) -> Any:
        return False

    def observation_space(self, params: Any) -> Any:
        return None


class Nan(CartPole):
    def step_env(self, *given: Any) -> Any:
        obs, state, reward, fell, info = super().step_env(*given)
        return obs, state, reward * jnp.where(state.time == 3, jnp.nan, 1.0), fell, info


def test_whole_numbers_of_a_reset_take_the_fractions_of_a_step_and_typed_keys_are_saved() -> None:
    env, other = opened(Purse()), opened(Purse())
    actions = np.zeros((3, N), np.int32)
    assert env.start()[0].tolist() == [[0.0]] * N
    first = played(env, actions)
    totals, rewards = np.array(first[0::3])[:, :, 0], np.array(first[2::3])
    assert (np.diff(totals, axis=0) > 0.5).all()
    np.testing.assert_allclose(rewards, [np.zeros(N), totals[0], totals[0] + totals[1]], rtol=1e-6)
    other.restore(env.state())
    for a, b in zip(played(other, actions), played(env, actions), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (object(), "which is not a functional environment of gymnax .* Brax or MuJoCo Playground .* or jumanji"),
        (AutoResetWrapper(Ball()), "is wrapped in AutoResetWrapper, .*; make it without"),
        (Shaped(jnp.bfloat16), "observation is of type bfloat16, which cannot be stored; wrap the environment"),
        (Broken(), "raised ValueError in a reset and a step: no table; fix the environment"),
        (Parts(), "action space .*, of several parts; wrap it so that an action is one array"),
    ],
)
def test_what_cannot_be_stepped_is_refused(env: Any, sentence: str) -> None:
    with pytest.raises(EnvBuildError, match=sentence):
        opened(env)


def test_an_unknown_key_of_info_is_refused() -> None:
    with pytest.raises(EnvBuildError, match=r"angel is in the info of neither .* where angle, deep is"):
        opened(CartPole(), info=[{"key": "angel"}])
    assert opened(CartPole(), info=[{"key": "deep.fell"}]).info_leaves == (
        InfoField(key="deep.fell", dtype="bool", shape=()).leaf,
    )


def test_nan_is_refused() -> None:
    env = opened(Nan())
    env.start()
    with pytest.raises(EnvCrashed, match=r"environment 0 of .* returned a NaN reward"):
        played(env, draw(env))
