"""`cormorant envs` over what is really installed."""

import json
from pathlib import Path

import pytest

from cormorant_cli import __main__ as entry
from cormorant_cli.commands.validate import judge


def test_spaces_of_tasks_of_both_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["envs", "cartpole-v1", "--spaces", "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(entry["engine"], entry["id"]): entry for entry in entries}
    for engine in ("envpool", "gymnasium"):
        assert found[engine, "CartPole-v1"]["action"] == "Discrete(2)"
        assert found[engine, "CartPole-v1"]["observation"].endswith("(4,), float32)")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["p?ng-*"], 0, "envpool    Pong-v5\n"),
        (["Pnog"], 2, 'no environment matches "Pnog"; did you mean Pong-v5?\n'),
        (
            ["GymV21Environment-v0", "--spaces"],
            0,
            "missing: the environment GymV21Environment-v0 could not be built: I",
        ),
    ],
)
def test_names_find_environments_or_near_matches(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.run(["envs", *arguments]) == code
    assert words in "".join(capsys.readouterr())


def test_validate_finds_an_unknown_task_of_envpool(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text((Path(__file__).parents[3] / "examples/pong.yaml").read_text().replace("Pong-v5", "Pogn-v5"))
    assert judge(str(job))[1] == ()
    (problem,) = judge(str(job), imports=True)[1]
    assert str(problem).startswith(f'{job}: spec.env.envpool: EnvPool has no task "Pogn-v5"; did you mean Pong-v5')
