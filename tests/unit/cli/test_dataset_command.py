import json

import pytest

from cormorant_cli import __main__ as entry
from cormorant_testing.datasets import write_dataset


@pytest.fixture
def uri(tmp_path):
    return write_dataset(str(tmp_path / "data"))


def run(*arguments):
    return entry.run(["dataset", *arguments])


def test_ls_shows_parts_and_sums(uri, capsys):
    assert run("ls", uri) == 0
    text = capsys.readouterr().out
    assert "cpu-0-0" in text
    assert "8 frames in 1 part" in text
    run("ls", uri, "--json")
    told = json.loads(capsys.readouterr().out)
    assert (told["job"], told["frames"], told["parts"][0]["shards"]) == ("pole", 8, 1)


def test_verify_accepts_a_good_dataset_and_refuses_a_changed_one(uri, tmp_path, capsys):
    assert run("verify", uri) == 0
    assert "ok, 8 frames in 1 shard of 1 part" in capsys.readouterr().out
    shard = tmp_path / "data" / "cpu-0-0" / "frames-000000.arrow"
    shard.write_bytes(shard.read_bytes() + b"x")
    assert run("verify", uri) == 1
    assert "the manifest says" in capsys.readouterr().err


def test_export_is_beside_the_dataset_and_names_what_is_cut(uri, tmp_path, capsys):
    assert run("export", uri, "--to", "parquet") == 0
    assert (tmp_path / "data-parquet" / "cpu-0-0.parquet").exists()
    assert "8 frames, 0 episodes, plus 2 incomplete" in capsys.readouterr().out
    assert run("export", uri, "--to", "lerobot", "--fps", "50", "--out", str(tmp_path / "robot")) == 0
    assert "8 frames, 2 episodes, 2 of them incomplete" in capsys.readouterr().out
    assert json.loads((tmp_path / "robot" / "meta" / "info.json").read_text())["fps"] == 50


def test_what_cannot_be_is_a_sentence(tmp_path, capsys):
    assert run("export", "memory://nowhere", "--to", "parquet") == 2
    assert "--out is required" in capsys.readouterr().err
    assert run("verify", str(tmp_path)) == 1
    assert "there is no dataset at" in capsys.readouterr().err
