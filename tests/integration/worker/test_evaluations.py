"""The table of an evaluation: the same bits for any number of workers, and through kills of workers and of the run. At
the end, version against version: each group of agents plays its checkpoint, in every pairing of them.
"""

import itertools
import json
import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import envpool
import gymnasium
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from cormorant import evaluate, load_job, make_collector
from cormorant.policies import mlp
from cormorant_cli import __main__ as entry
from cormorant_cli.commands.evaluate import show_table
from cormorant_contract.episodes import files_of
from cormorant_contract.job import CollectorJob
from cormorant_testing.collecting import make_job
from cormorant_testing.envs import CountingEnv
from cormorant_testing.fleets import make_fleet, on_both_engines_slowly
from cormorant_testing.placements.parties import DRAWN, PartyJob, weights_of
from cormorant_testing.policies import Board
from cormorant_testing.snippets import ROOT, blocks
from cormorant_worker.errors import EnvError, EvaluationError, ManifestError, StateError, WeightsError, WorkerFailed
from cormorant_worker.fleet.options import RayOptions
from cormorant_worker.fleet.ray.engine import RayEngine
from cormorant_worker.run_evaluation import evaluation_job, run_evaluation
from manifest_making import Document, manifest


def job_of(env: Mapping[str, Any], policy: str = "cormorant.policies:mlp") -> CollectorJob:
    job: CollectorJob = make_job(env=env, policy=policy, collection={"framesPerBatch": 66, "seed": 3})
    return job


CARTPOLE = job_of({"envpool": {"taskId": "CartPole-v1", "numEnvs": 3}})


def slow() -> CollectorJob:
    """Episodes of about a tenth of a second, with noise in every action."""
    environment = {
        "entrypoint": "cormorant_testing.envs:CountingEnv",
        "vectorization": "inline",
        "kwargs": {"longest": 40, "step_s": 0.004},
        "numEnvs": 2,
    }
    return job_of({"gymnasium": environment})


def engine_of(name: str) -> RayOptions | None:
    return RayOptions(num_cpus=0) if name == "ray" else None


@on_both_engines_slowly
@pytest.mark.parametrize("deterministic", [True, False], ids=["best", "drawn"])
def test_table_is_bit_equal_for_1_and_4_workers(engine: str, deterministic: bool, tmp_path: Path) -> None:
    chosen = {"episodes": 23, "deterministic": deterministic}
    one = evaluate(CARTPOLE, **chosen, workers=1)
    four = evaluate(CARTPOLE, **chosen, workers=4, directory=tmp_path, engine=engine_of(engine))
    assert one.is_complete
    assert [episode.seed for episode in one.episodes] == list(range(3, 26))
    assert four.to_json() == one.to_json()


@pytest.mark.slow
@on_both_engines_slowly
def test_killed_workers_change_no_bit_of_the_table(engine: str, tmp_path: Path) -> None:
    whole = evaluate(slow(), episodes=24, workers=2, deterministic=False)
    killed: list[int] = []

    def kill_one(stats: Any) -> None:
        stepping = [worker.pid for worker in stats.workers if worker.phase == "stepping" and worker.pid not in killed]
        if stepping and len(killed) < 2 and stats.frames >= 4 * len(killed):
            killed.append(stepping[0])
            os.kill(stepping[0], signal.SIGKILL)

    job = evaluation_job(load_job(slow()), str(tmp_path), episodes=24, deterministic=False)
    on_ray = RayEngine(options) if (options := engine_of(engine)) else None
    table = run_evaluation(job, workers=2, engine=on_ray, look=kill_one)
    assert len(killed) == 2
    assert table.to_json() == whole.to_json()


def test_an_evaluation_takes_no_other_weights_states_or_seeds(tmp_path: Path) -> None:
    with make_fleet(make_job(), workers=1) as fleet:
        state = fleet.state()
    job = evaluation_job(slow(), str(tmp_path), episodes=40)
    with make_fleet(job, workers=1) as fleet:
        with pytest.raises(WeightsError, match="an evaluation plays the weights that it began with"):
            fleet.publish({"weight": torch.zeros(1)})
        for change in (fleet.state, lambda: fleet.restore(state), lambda: fleet.seed(4)):
            with pytest.raises(StateError, match="an evaluation has no state, and each of its episodes a seed"):
                change()
        assert fleet.stats().total_frames == 40


@pytest.mark.parametrize("vectorization", ["subprocess", "inline"])
def test_an_environment_that_dies_is_named_by_its_seed(vectorization: str) -> None:
    """Inline, it takes the worker with it, as one of EnvPool's would."""
    kwargs = {"lengths": 5, "failures": [{"how": "exit", "step": 3, "seeds": [5]}]}
    env = {"entrypoint": "cormorant_testing.envs:CountingEnv", "vectorization": vectorization, "kwargs": kwargs}
    seen: list[int] = []
    job = job_of({"gymnasium": {**env, "numEnvs": 3}}, policy="")
    with pytest.raises(WorkerFailed, match="3 workers ended while they played the episode with seed 5: fix the env"):
        evaluate(job, episodes=4, workers=1, look=lambda stats: seen.append(stats.restarts))
    assert max(seen) <= 2


def test_classes_and_modules_are_evaluated_as_fleets_take_them(tmp_path: Path) -> None:
    torch.manual_seed(3)
    network = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Sigmoid())
    metrics = {"episodeMetrics": [{"name": "last", "key": "nested.echo"}]}
    count = partial(CountingEnv, longest=9, action="box")
    chosen = {"env": count, "policy": network, "episodes": 5, "seed": 4, "collection": metrics, "info": ["nested.echo"]}
    made = evaluate(env=lambda: gymnasium.make("CartPole-v1"), policy="cormorant.policies:mlp", episodes=2, workers=1)
    assert len(made.episodes) == 2
    one = evaluate(**chosen, workers=1, num_envs=2, directory=tmp_path)
    assert [episode.seed for episode in one.episodes] == [4, 5, 6, 7, 8]
    two = evaluate(**chosen, workers=2, num_envs=1, vectorization_mode="inline")
    assert two.to_json() == one.to_json()
    for episode in one.episodes:
        env, total = count(), 0.0
        seen, info = env.reset(seed=episode.seed)
        for _ in range(episode.length):
            with torch.inference_mode():
                action = network(torch.from_numpy(seen)[None])[0].numpy()
            seen, reward, ended, _, info = env.step(action)
            total += reward
        assert (ended, total, info["nested"]["echo"]) == (True, episode.total, episode.metrics["last"])
    with torch.no_grad():
        network[0].bias += 1.0
    with pytest.raises(EvaluationError, match="holds the results of another evaluation: env was"):
        evaluate(**chosen, workers=1, directory=tmp_path)
    with pytest.raises(ManifestError, match="manifest and env exclude each other"):
        evaluate(CARTPOLE, env=count, episodes=1)


def test_videos_are_of_the_tables_episodes_or_refused(tmp_path: Path) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    environment = {"entrypoint": "cormorant_testing.envs:PicturedEnv", "kwargs": {"longest": 20}, "numEnvs": 2}
    job = job_of({"gymnasium": {**environment, "vectorization": "inline"}})
    table = evaluate(job, episodes=3, workers=1, directory=tmp_path, videos=2)
    files = sorted((tmp_path / "videos").iterdir())
    assert [file.name for file in files] == ["episode-0-seed-3.mp4", "episode-1-seed-4.mp4"]
    pictures = [ffmpeg.count_frames_and_secs(str(file))[0] for file in files]
    assert pictures == [row.length + 1 for row in table.episodes[:2]]
    with pytest.raises(EvaluationError, match="videos need a folder of this machine"):
        evaluate(CARTPOLE, episodes=1, videos=1)
    with pytest.raises(EnvError, match="EnvPool's CartPole-v1 cannot be recorded"):
        evaluate(CARTPOLE, episodes=1, workers=1, directory=tmp_path / "other", videos=1)


def test_the_python_of_the_how_to_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks("docs/how-to/evaluate.md", "python")
    (tmp_path / "job.yaml").write_text((ROOT / "examples/cartpole-ppo.yaml").read_text())
    torch.manual_seed(11)
    with make_collector(CARTPOLE) as collector:
        weights = {name: 3 * torch.randn_like(value) for name, value in mlp(*collector.spaces).state_dict().items()}
    save_file(weights, tmp_path / "policy.safetensors")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "evaluate.md", "exec"), {"__name__": "page"})
    mean, returns = capsys.readouterr().out.splitlines()[-1].split(" ", 1)
    assert len(json.loads(returns)) == 100
    tables = [evaluate("job.yaml", given, episodes=7, seed=1, workers=1) for given in (weights, None)]
    found, without = ([row.total for row in table.episodes] for table in tables)
    assert found == json.loads(returns)[:7] != without
    assert float(mean) == pytest.approx(sum(json.loads(returns)) / 100)


# -- version against version -----------------------------------------------------------------------------------

BOARD = {"entrypoint": "cormorant_testing.policies:Board"}
GAME = {"envpool": {"taskId": "TicTacToe-v1", "numEnvs": 3, "groups": "perAgent"}}


def versus(env: Document, **agents: Document) -> Document:
    document = manifest("versus", env=env, policy={"agents": agents})
    document["spec"]["collection"] = {"framesPerBatch": 60, "seed": 3}
    return document


def party(**agents: Document) -> Document:
    """An agent earns what it acts."""
    return PartyJob(policies=DRAWN | agents).manifest()


def numbered(folder: Path, version: int) -> Path:
    path = folder / f"{version}.safetensors"
    save_file({f"red/{name}": tensor for name, tensor in weights_of(version, recurrent=False).items()}, path)
    return path


def boards(folder: Path, count: int) -> dict[str, Board]:
    found = {}
    for seed in range(count):
        torch.manual_seed(seed)
        board = Board(None, None)
        path = folder / f"{seed}.safetensors"
        save_file(board.state_dict(), path)  # without a model's name
        found[str(path)] = board
    return found


def play(boards: tuple[Board, ...], seed: int) -> tuple[list[float], int]:
    """The returns and the length of one game, in a plain loop."""
    pool = envpool.make("TicTacToe-v1", env_type="gymnasium", num_envs=1, seed=[seed])
    seen, said = pool.reset()
    returns, length, is_over = np.zeros(len(boards)), 0, False
    while not is_over:
        player = int(said["current_player"][0])
        mask = torch.from_numpy(said["legal_action_mask"])
        with torch.no_grad():
            moves = boards[player]({"observation": torch.from_numpy(seen[player : player + 1]), "action_mask": mask})
        seen, reward, terminated, truncated, said = pool.step(moves.int().numpy())
        returns, length, is_over = returns + reward, length + 1, bool(terminated[0] or truncated[0])
    return returns.tolist(), length


def test_the_table_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    found = boards(tmp_path, 3)
    document = versus(GAME, player_0=BOARD, player_1={"model": "player_0", "sample": {"window": 2}})
    folder = tmp_path / "results"
    table = evaluate(document, [*found], episodes=7, workers=2, directory=folder)
    plain = [
        (dict(zip(("player_0", "player_1"), uris, strict=True)), seed, *play(tuple(found[uri] for uri in uris), seed))
        for uris in itertools.product(found, repeat=2)
        for seed in range(3, 10)
    ]
    rows = table.episodes
    assert [(files_of(r.checkpoint), r.seed, [*r.returns.values()], r.length) for r in rows] == plain
    assert evaluate(document, [*found], episodes=7, workers=1).to_json() == table.to_json()
    written = json.loads((folder / "evaluation.json").read_text())
    for (label, summary), uris in zip(written["checkpoints"].items(), itertools.product(found, repeat=2), strict=True):
        assert tuple(files_of(label).values()) == uris
        for player, group in enumerate(("player_0", "player_1")):
            own = [returns[player] for files, _, returns, _ in plain if tuple(files.values()) == uris]
            told = summary["summary"]["groups"][group]
            assert told["return"]["mean"] == sum(own) / 7
            assert [told[what] for what in ("wins", "draws", "losses")] == [own.count(won) for won in (1, 0, -1)]
    frame = pq.read_table(folder / "episodes.parquet").to_pydict()
    assert frame["returns.player_1"] == [returns[1] for _, _, returns, _ in plain]
    assert [json.loads(label) for label in frame["checkpoint"]] == [files for files, *_ in plain]
    assert len({row[2][0] for row in plain}) > 1


def test_one_file_is_played_by_all_groups_also_against_a_script(tmp_path: Path) -> None:
    script = {"entrypoint": "cormorant_testing.placements.parties:scripted"}
    uris = [numbered(tmp_path, version) for version in (5, 6)]
    (row,) = evaluate(party(green=script), uris[0], episodes=1, workers=1).episodes
    assert row.returns == {"red": 10 * row.length, "blue": 5 * row.length, "green": row.length}
    assert row.total == 16 * row.length
    with pytest.raises(WorkerFailed, match=r"the policy of the group green has no weights.*one file at a time"):
        evaluate(party(green=script), uris, episodes=1, workers=1)


def test_pairings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    game = versus(GAME, player_0=BOARD, player_1={"model": "player_0"})
    with pytest.raises(ManifestError, match=r"289 pairings for the 2 groups of .*, and at most 256 are played"):
        evaluate(game, [f"{number}.safetensors" for number in range(17)], episodes=1)
    with pytest.raises(ManifestError, match="weights is an empty list; name files"):
        evaluate(game, [], episodes=1)
    for files in (numbered(tmp_path, 1), [numbered(tmp_path, 1), *boards(tmp_path, 1)]):
        misfit = r"1\.safetensors do not fit the policy.* missing: player_0/likes\.weight; missing"
        with pytest.raises(WorkerFailed, match=misfit):
            evaluate(game, files, episodes=1, workers=1)


def test_the_command_prints_a_line_for_each_pairing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uris, path = [*boards(tmp_path, 2)], tmp_path / "job.json"
    path.write_text(json.dumps(versus(GAME, player_0=BOARD, player_1={"model": "player_0"})))
    files = [word for uri in uris for word in ("--weights", uri)]
    arguments = ["evaluate", str(path), *files, "--episodes", "4", "--workers", "1", "--output", str(tmp_path / "out")]
    assert entry.run(arguments) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    columns = "PLAYER_0 PLAYER_1 EPISODES PLAYER_0.RETURN PLAYER_0.W/D/L PLAYER_1.RETURN PLAYER_1.W/D/L LENGTH"
    assert header.split() == columns.split()
    assert [line.split()[:3] for line in lines] == [[*pair, "4"] for pair in itertools.product(uris, repeat=2)]
    assert entry.run([*arguments, "--json"]) == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [tuple(found["weights"].values()) for found in documents] == [*itertools.product(uris, repeat=2)]
    shown = show_table([(found["weights"], found["summary"]) for found in documents])
    assert shown.splitlines() == [header, *lines]
