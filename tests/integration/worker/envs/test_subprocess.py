import contextlib
import os
import select
import signal
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import structlog
from torch.utils._pytree import tree_leaves

from cormorant_testing.envs import ACTION_SPACES, OBSERVATION_SPACES
from cormorant_testing.scripts import start_script, until
from cormorant_testing.vectors import counting, step_times
from cormorant_worker.envs.gymnasium_env import EnvFactory
from cormorant_worker.envs.protocol import EVERY_ROW, Step
from cormorant_worker.envs.restarts import RestartLimits
from cormorant_worker.envs.single_envs import InlineVectorEnv
from cormorant_worker.envs.subprocess import SubprocessVectorEnv
from cormorant_worker.errors import EnvBuildError, EnvCrashed, EnvNotSaved, StateError
from cormorant_worker.spaces import flatten

SEEDS = [7, 70, 700]
both = pytest.mark.parametrize("kind", [InlineVectorEnv, SubprocessVectorEnv])


@contextlib.contextmanager
def subprocesses(
    num_envs: int = 3,
    *,
    kind: type = SubprocessVectorEnv,
    timeouts: dict[str, float] = {},  # noqa: B006
    limits: RestartLimits = RestartLimits(),  # noqa: B008
    **options: object,
) -> Iterator[Any]:
    with contextlib.closing(kind(counting(**options), seeds=SEEDS[:num_envs], limits=limits, **timeouts)) as env:
        yield env


@contextlib.contextmanager
def twins(
    num_envs: int = 3, *, failures: Sequence[Mapping[str, Any]] = (), how: str = "raise", **options: Any
) -> Iterator[tuple[Any, Any, Callable[..., Step]]]:
    """Environments in processes, the same ones inline, and a function that steps both and compares them; an oracle
    checks inline ones in `test_collector.py`. `how`: what those in processes do where the others raise; "": they go on.
    """
    ours_fail = [{**failure, "how": how} for failure in failures]
    theirs_fail = [{**failure, "flag": f"{failure['flag']}-" if "flag" in failure else ""} for failure in failures]
    timeouts = {"step_timeout_s": 2} if how == "hang" else {}
    with (
        subprocesses(num_envs, timeouts=timeouts, failures=ours_fail, **options) as ours,
        subprocesses(num_envs, kind=InlineVectorEnv, failures=theirs_fail, **options) as theirs,
    ):
        space = ours.action_space
        space.seed(0)

        def step(numbers: Sequence[int] = ()) -> Step:
            drawn = [flatten(space, space.sample()) for _ in numbers or range(num_envs)]
            actions = tuple(np.stack(leaf) for leaf in zip(*drawn, strict=True))
            for env in (ours, theirs):
                env.send(actions, np.array(numbers) if numbers else EVERY_ROW)
            found, wanted = ours.recv(), theirs.recv()
            assert_same(found, wanted)
            return found

        assert_same(ours.start(), theirs.start())
        yield ours, theirs, step


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


@pytest.mark.parametrize(
    ("observation", "action"), list(zip(sorted(OBSERVATION_SPACES), [*sorted(ACTION_SPACES), "discrete"], strict=True))
)
def test_every_kind_of_space_is_exact(observation: str, action: str) -> None:
    with twins(2, action=action, observation=observation, lengths=(3, 1, 4), ends="alternate") as (_, _, step):
        assert sum(len(step().ended) for _ in range(20)) > 10


def test_rows_go_in_any_order_restart_and_are_restored() -> None:
    with twins(lengths=(2, 3)) as (ours, theirs, step), subprocesses(lengths=(2, 3)) as other:
        for rows in ([2, 0], [1], [0, 1, 2], [2], [2, 1], [0]):
            step(rows)
        for env in (ours, theirs):
            np.testing.assert_array_equal(env.restart(np.array([2, 0]))[0][:, [0, 2]], [[700, 0], [7, 0]])
        step()
        other.start()
        other.restore(ours.state())
        for _ in range(9):
            assert_same(step_times(other, 1), step_times(theirs, 1))
        with pytest.raises(StateError):
            other.restore(b"[]")


def test_a_step_stays_as_it_is_while_the_next_one_is_under_way() -> None:
    with subprocesses(lengths=5) as env:
        env.start()
        first = step_times(env, 1)
        env.send((np.zeros(3, np.int64),), EVERY_ROW)
        time.sleep(0.2)
        np.testing.assert_array_equal(first.obs[0][:, 2], [1, 1, 1])
        np.testing.assert_array_equal(first.reward, [1, 1, 1])
        np.testing.assert_array_equal(env.recv().obs[0][:, 2], [2, 2, 2])


@both
def test_failed_save_leaves_no_answer_for_the_next(kind: type, tmp_path: Path) -> None:
    failure = {"at": "save", "seeds": SEEDS[:1], "flag": str(tmp_path / "raised")}
    with subprocesses(kind=kind, lengths=50, failures=[failure]) as env:
        env.start()
        with pytest.raises(EnvCrashed, match="environment 0 could not be saved: it raised ValueError: told to fail"):
            env.state()
        if kind is SubprocessVectorEnv:
            others = [env._running[row].connection for row in (1, 2)]
            assert select.select(others, [], [], 0.5)[0] == []
        step_times(env, 2)
        assert env.restarts == 1
        assert env.state()


@both
def test_environments_without_states_cannot_be_saved(kind: type) -> None:
    with contextlib.closing(kind(EnvFactory(id="CartPole-v1"), seeds=[1, 2])) as env:
        env.start()
        with pytest.raises(EnvNotSaved, match=r"^CartPoleEnv has no get_state and set_state$"):
            env.state()
        step_times(env, 1)
        env.close()  # as when it is left


def test_a_second_start_begins_again_with_the_same_seeds() -> None:
    with subprocesses(lengths=5) as env:
        first = env.start()
        step_times(env, 2)
        assert_same(env.start(), first)
        kill(env._running[1].pid)
        step_times(env, 1)
        assert env.start()[0][1, 0] != 70


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "raised ValueError: told to fail"),
        ("exit", "exited with code 7"),
        ("kill", "was killed by SIGKILL"),
        ("hang", "did not answer within 2 s"),
    ],
)
def test_a_failing_environment_is_restarted_alone(how: str, reason: str) -> None:
    failures = [{"step": 6, "seeds": [70]}]
    with structlog.testing.capture_logs() as logs, twins(lengths=4, failures=failures, how=how) as (env, _, step):
        pids = [env._running[row].pid for row in range(3)]
        assert [list(step().fresh) for _ in range(10)] == [[]] * 5 + [[1]] + [[]] * 4
        assert env.restarts == 1
        assert [env._running[row].pid == pid for row, pid in enumerate(pids)] == [True, False, True]
        assert not psutil.pid_exists(pids[1])
    entries = [(entry["env"], entry["reason"], entry["steps"]) for entry in logs if entry["event"] == "env_restarted"]
    assert entries == [(1, reason, 5), (1, "raised ValueError: told to fail", 5)]


def test_an_environment_killed_between_steps_comes_back_fresh() -> None:
    with twins(lengths=4, failures=[{"step": 2, "seeds": [700]}], how="") as (env, _, step):
        step()
        kill(env._running[2].pid)
        assert [list(step(rows).fresh) for rows in ([0, 1], [2, 1, 0], [0, 1, 2])] == [[], [0], []]
        os.kill(env._running[0].pid, signal.SIGKILL)
        np.testing.assert_array_equal(env.restart(np.array([0]))[0][:, 1:3], [[0, 0]])


def test_a_failing_reset_at_the_end_of_an_episode_is_restarted(tmp_path: Path) -> None:
    failures = [{"at": "reset", "seeds": [70], "flag": str(tmp_path / "flag"), "skip": 1}]
    with twins(lengths=3, failures=failures, how="hang") as (_, _, step):
        assert [list(step().fresh) for _ in range(5)] == [[], [], [1], [], []]


def test_a_restart_that_fails_is_tried_again(tmp_path: Path) -> None:
    failures = [{"step": 2, "seeds": [7]}, {"at": "init", "flag": str(tmp_path / "flag"), "skip": 1, "times": 2}]
    with twins(1, lengths=9, failures=failures, how="exit") as (env, _, step):
        assert [list(step().fresh) for _ in range(4)] == [[], [0], [], []]
        assert env.restarts == 3


@both
def test_an_environment_that_always_raises_in_step_1_is_given_up(kind: type) -> None:
    with subprocesses(2, kind=kind, failures=[{"step": 1, "words": "the simulator is gone"}]) as env:
        env.start()
        with pytest.raises(EnvCrashed) as caught:
            step_times(env, 10)
    message = str(caught.value)
    assert "raised ValueError: the simulator is gone (after 0 completed steps" in message
    assert "restarted 3 times without completing a step" in message
    assert "\n" not in message
    assert "in step\n" in caught.value.__notes__[0]  # a line of the environment's traceback
    assert not caught.value.has_stepped


@both
@pytest.mark.parametrize(
    ("how", "lengths", "observation", "words"),
    [
        ("nan", 9, "box", "environment 1 returned NaN in observation"),
        ("nan", 9, "nested", r"environment 1 returned NaN in observation\.pos\.counts"),
        ("nan", 3, "box", "environment 1 returned NaN in observation"),  # the final one
        ("shape", 9, "box", r"returned observation of shape \(99,\) in step 3.*\(4,\)"),
        ("shape", 9, "dict", "does not fit its space"),
    ],
)
def test_nan_and_misshapen_observations_are_refused(
    how: str, lengths: int, observation: str, words: str, kind: type
) -> None:
    failures = [{"how": how, "step": 3, "seeds": [70]}]
    with subprocesses(kind=kind, lengths=lengths, observation=observation, failures=failures) as env:
        env.start()
        with pytest.raises(EnvCrashed, match=words):
            step_times(env, 3)


@pytest.mark.parametrize(
    ("kind", "failure", "words"),
    [
        (InlineVectorEnv, {"at": "init"}, "could not be built: ValueError: told to fail"),
        (SubprocessVectorEnv, {"at": "init"}, "could not be built: ValueError: told to fail"),
        (SubprocessVectorEnv, {"at": "init", "how": "exit"}, "exited with code 7 before its first step"),
        (InlineVectorEnv, {"at": "reset"}, "environment 0 .*CountingEnv.* raised ValueError: told to fail before"),
        (SubprocessVectorEnv, {"at": "reset"}, "environment [01] .*CountingEnv.* raised ValueError: told to fail"),
        (SubprocessVectorEnv, {"at": "reset", "how": "kill"}, "was killed by SIGKILL before its first step"),
        (SubprocessVectorEnv, {"at": "init", "how": "hang"}, "within 3 s"),
        (SubprocessVectorEnv, {"at": "reset", "how": "hang"}, "within 3 s"),
    ],
)
def test_a_failing_constructor_or_first_reset_is_a_build_error(kind: type, failure: dict, words: str) -> None:
    timeouts = {"reset_timeout_s": 3} if words == "within 3 s" else {}
    environments = subprocesses(2, kind=kind, timeouts=timeouts, failures=[failure])
    with pytest.raises(EnvBuildError, match=words) as caught, environments as env:
        env.start()
    if "told to fail" in words:
        assert "envs.py" in caught.value.__notes__[0], "the traceback, also a child's"


@pytest.mark.parametrize(("limit", "steps"), [({"recycle_episodes": 2}, 6), ({"recycle_rss_mib": 1}, 3)], ids=str)
def test_a_recycled_environment_loses_no_frame(limit: dict[str, int], steps: int) -> None:
    options = {"lengths": 3, "ends": "alternate"}
    limits = RestartLimits(total=0, **limit)  # none of them counts as a failure
    with subprocesses(2, limits=limits, **options) as env, subprocesses(2, kind=InlineVectorEnv, **options) as plain:
        assert_same(env.start(), plain.start())
        before = [env._running[row].pid for row in range(2)]
        for step in range(1, steps + 1):
            ours, theirs = step_times(env, 1), step_times(plain, 1)
            assert_same((ours[2:5], ours.final), (theirs[2:5], theirs.final))  # reward and flags
            if step < steps:
                assert_same(ours.obs, theirs.obs)
        assert env.restarts == 2
        assert not {env._running[row].pid for row in range(2)} & {*before}
        assert not any(map(psutil.pid_exists, before))
        (obs,), after = ours.obs, step_times(env, 1)
        assert not {*obs[:, 0].astype(int)} & {*SEEDS}
        assert not obs[:, 1:].any()
        assert not len(after.fresh)
        np.testing.assert_array_equal(after.obs[0][:, :3], [[ident, 0, 1] for ident in obs[:, 0]])


def test_children_run_one_thread() -> None:
    with subprocesses(1) as env:
        assert psutil.Process(env._running[0].pid).environ()["OMP_NUM_THREADS"] == "1"


def test_close_in_the_middle_of_an_endless_step_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cormorant_worker.envs.subprocess._CLOSE_TIMEOUT_S", 600.0)  # longer than a test may take
    env = SubprocessVectorEnv(counting(failures=[{"how": "hang", "step": 1}]), seeds=[1, 2])
    env.start()
    env.send((np.zeros(2, np.int64),), EVERY_ROW)
    pids = [process.pid for process in env._running.values()]
    env.close()
    assert not any(map(psutil.pid_exists, pids))


def test_restarts_and_close_leave_no_process_or_descriptor() -> None:
    at_first = psutil.Process().num_fds()
    with subprocesses(2, lengths=100, failures=[{"how": "exit", "step": 2}]) as env:
        env.start()
        step_times(env, 2)
        before = psutil.Process().num_fds()
        step_times(env, 6)
        assert env.restarts == 8
        assert psutil.Process().num_fds() <= before  # what an earlier test left may be collected meanwhile
        children = psutil.Process().children(recursive=True)
        pids = {process.pid for process in env._running.values()}
        assert pids <= {child.pid for child in children}
        assert not [child for child in children if child.status() == psutil.STATUS_ZOMBIE]
        env.close()
    assert psutil.Process().num_fds() <= at_first
    assert not any(map(psutil.pid_exists, pids))
    with pytest.raises(RuntimeError, match="closed"):
        env.start()


def test_children_die_with_a_killed_parent() -> None:
    """While they step, also those that a thread made which has ended."""
    code = """
        import threading, time
        import numpy as np
        from cormorant_testing.vectors import counting
        from cormorant_worker.envs.subprocess import SubprocessVectorEnv
        envs = []
        def make():
            env = SubprocessVectorEnv(counting(step_s=1000.0), seeds=[1, 2])
            env.start()
            env.send((np.zeros(1, np.int64),), np.array([0]))
            envs.append(env)
        maker = threading.Thread(target=make)
        maker.start()
        maker.join()
        time.sleep(0.3)
        print(*[process.pid for process in envs[0]._running.values()], flush=True)
        time.sleep(1000)
    """
    with script(code) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        parent.kill()
        parent.wait()
        until(lambda: not any(map(is_alive, pids)), seconds=20)


def test_ctrl_c_reaches_the_parent_only() -> None:
    code = """
        import time
        from cormorant_testing.vectors import counting, step_times
        from cormorant_worker.envs.subprocess import SubprocessVectorEnv
        env = SubprocessVectorEnv(counting(), seeds=[1, 2])
        env.start()
        try:
            print("ready", flush=True)
            time.sleep(100)
        except KeyboardInterrupt:
            step_times(env, 5)
            env.close()
            print("closed", env.restarts, flush=True)
    """
    with script(code) as parent:
        assert parent.stdout.readline() == "ready\n"
        os.killpg(parent.pid, signal.SIGINT)
        output, errors = parent.communicate(timeout=20)
        assert (output, errors) == ("closed 0\n", "")


@contextlib.contextmanager
def script(code: str) -> Iterator[Any]:
    with start_script(textwrap.dedent(code)) as process:
        try:
            yield process
        finally:
            process.kill()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
