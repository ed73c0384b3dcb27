"""The five scripts of examples/short: each fits on a screen, imports one package of ours, and does what it says."""

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cormorant_testing.serving import serve
from cormorant_testing.snippets import ROOT
from cormorant_worker.launch import load_job

SHORT = ROOT / "examples" / "short"
SCREEN = 50


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of small networks wait for each other beside other work: 40 updates of PPO did not end within 300 s."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def main_of(name: str) -> object:
    return runpy.run_path(str(SHORT / name))["main"]


@pytest.mark.parametrize("path", sorted(SHORT.glob("*.py")), ids=lambda path: path.name)
def test_it_fits_on_a_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= SCREEN


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ppo_learns() -> None:
    assert main_of("ppo.py")() > 100  # type: ignore[operator]  # 22 at first


def test_an_evaluation_has_a_mean(capfd: pytest.CaptureFixture[str]) -> None:
    assert 8 < main_of("evaluation.py")(12) < 500  # type: ignore[operator]
    assert "warning" not in capfd.readouterr().out, "its workers have no state to save"


def test_a_dataset_is_read_and_learned_from(tmp_path: Path) -> None:
    assert 0 < main_of("offline.py")(str(tmp_path / "data"), 2_000) < 1  # type: ignore[operator]


@pytest.mark.slow
def test_a_learner_elsewhere_publishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(load_job(ROOT / "examples" / "cartpole-ppo.yaml"), directory=tmp_path) as served:
        monkeypatch.setenv("CORMORANT_TOKEN", served.writer.token)
        assert main_of("remote.py")(served.server.url, 3) > 0  # type: ignore[operator]
