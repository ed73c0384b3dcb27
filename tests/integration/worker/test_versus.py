"""Evaluations of version against version: each group of agents plays its checkpoint, in every pairing of them."""

import itertools
import json
from pathlib import Path

import envpool
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from cormorant import evaluate
from cormorant_cli import __main__ as entry
from cormorant_cli.commands.evaluate import show_table
from cormorant_contract.episodes import files_of
from cormorant_testing.placements.parties import DRAWN, PartyJob, weights_of
from cormorant_testing.policies import Board
from cormorant_worker.errors import ManifestError, WorkerFailed
from manifest_making import Document, manifest

BOARD = {"entrypoint": "cormorant_testing.policies:Board"}
GAME = {"envpool": {"taskId": "TicTacToe-v1", "numEnvs": 3, "groups": "perAgent"}}


def job(env: Document, **agents: Document) -> Document:
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
    document = job(GAME, player_0=BOARD, player_1={"model": "player_0", "sample": {"window": 2}})
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


def test_each_group_acts_with_its_checkpoint(tmp_path: Path) -> None:
    uris = [numbered(tmp_path, version) for version in (5, 6)]
    table = evaluate(party(), uris, episodes=6, workers=1)
    played = []
    for row in table.episodes:
        files = files_of(row.checkpoint)
        red, blue = (int(Path(files[group]).stem) for group in ("red", "blue"))
        played.append((blue, red))
        assert (row.returns["red"], row.returns["blue"]) == (2 * red * row.length, blue * row.length)
        assert row.returns["green"] > row.length
        assert row.total == pytest.approx(sum(row.returns.values()))
    assert played == [pair for pair in itertools.product((5, 6), repeat=2) for _ in range(6)]
    drawn = {(row.seed, row.returns["green"]) for row in table.episodes}
    assert len(drawn) == 6  # the same in each pairing
    assert len({value for _, value in drawn}) > 1


def test_one_file_is_played_by_all_groups_also_against_a_script(tmp_path: Path) -> None:
    script = {"entrypoint": "cormorant_testing.placements.parties:scripted"}
    uris = [numbered(tmp_path, version) for version in (5, 6)]
    (row,) = evaluate(party(green=script), uris[0], episodes=1, workers=1).episodes
    assert row.returns == {"red": 10 * row.length, "blue": 5 * row.length, "green": row.length}
    with pytest.raises(WorkerFailed, match=r"the policy of the group green has no weights.*one file at a time"):
        evaluate(party(green=script), uris, episodes=1, workers=1)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    game = job(GAME, player_0=BOARD, player_1={"model": "player_0"})
    with pytest.raises(ManifestError, match=r"289 pairings for the 2 groups of .*, and at most 256 are played"):
        evaluate(game, [f"{number}.safetensors" for number in range(17)], episodes=1)
    with pytest.raises(ManifestError, match="weights lists a Board; list paths or URIs"):
        evaluate(game, [Board(None, None)], episodes=1)
    with pytest.raises(WorkerFailed, match=r"missing: player_0/likes\.weight; missing"):
        evaluate(game, numbered(tmp_path, 1), episodes=1, workers=1)


def test_the_command_prints_a_line_for_each_pairing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uris, path = [*boards(tmp_path, 2)], tmp_path / "job.json"
    path.write_text(json.dumps(job(GAME, player_0=BOARD, player_1={"model": "player_0"})))
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
