"""The README and the documentation are run as they stand: their Python, their manifests, their commands."""

import html
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from jupyter_client.manager import start_new_kernel

from cormorant_testing.scripts import Server, unused_port
from cormorant_testing.serving import serve
from cormorant_testing.snippets import ROOT, blocks
from cormorant_worker.launch import load_job

pytestmark = pytest.mark.timeout(600)
BIN = Path(sys.executable).parent
WITH_BIN = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
MY_PKG = '''
"""What a reader has: a policy, a buffer, and a way to learn, which ends the page's loop after three calls."""
import gymnasium
from cormorant.policies import mlp

class Enough(Exception): ...

class Buffer:
    def extend(self, batch): ...
    def sample(self, size): ...

buffer, calls = Buffer(), 0

def make_policy():
    return mlp(gymnasium.spaces.Box(-1, 1, (4,)), gymnasium.spaces.Discrete(2))

def learn(policy, batch):
    global calls
    calls += 1
    if calls % 3 == 0:
        raise Enough
'''
RUN_BLOCKS = """
import ast, asyncio, inspect, sys
from my_pkg import Enough
names = {"__name__": "page"}
for block in sys.argv[1:]:
    try:
        made = eval(compile(block, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.iscoroutine(made): asyncio.run(made)
    except Enough:
        print("enough")
"""


def run(*command: str | Path, cwd: Path = ROOT, timeout_s: float = 300, env: Mapping[str, str] | None = None) -> str:
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, env=env or WITH_BIN)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def serving(command: str, cwd: Path) -> Iterator[dict[str, str]]:
    """Start a page's `cormorant run ... --serve --directory head` on a free port; yields the learner's environment."""
    url = f"http://127.0.0.1:{unused_port()}"
    environment = {**WITH_BIN, "CORMORANT_URL": url, "CORMORANT_TOKEN_FILE": "head/tokens.json", "PYTHONPATH": str(cwd)}
    words = [*command.partition("#")[0].split(), "--port", url.rpartition(":")[2]]
    with Server(words, f"{url}/readyz", cwd=cwd, env=environment) as head:
        yield environment
        head.end(signal.SIGINT)


def serve_line(page: str) -> str:
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    (line,) = {line.partition("#")[0].strip() for line in lines if "--serve" in line}
    return line


def test_readme_learner_runs(tmp_path: Path) -> None:
    learner, _ = blocks("README.md", "python")
    printed = run(sys.executable, "-c", learner, cwd=tmp_path)
    shown, _ = blocks("README.md", "text")
    assert shown in printed


def test_readme_picture_shows_these_commands_and_this_output() -> None:
    picture = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    shown = " ".join(html.unescape(re.sub("<[^>]+>", "", picture["PICTURE"].read_text())).split())
    for command in picture["COMMANDS"]:
        assert command in shown
        assert command in "".join(blocks("README.md", "sh"))
    assert "collected 65,536 frames" in shown
    assert "data/cheetah: ok, 65,536 frames" in shown


def test_pictures_of_the_live_page_are_of_this_page() -> None:
    picture = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    assert picture["DIGEST"].read_text() == picture["digest_of_page"](), "python docs/pictures.py"


@pytest.mark.slow
def test_readme_manifest_fills_its_dataset(tmp_path: Path) -> None:
    (manifest,) = blocks("README.md", "yaml")
    (tmp_path / "job.yaml").write_text(manifest)
    run(BIN / "cormorant", "validate", "job.yaml", cwd=tmp_path)
    run(BIN / "cormorant", "run", "job.yaml", cwd=tmp_path)
    report = run(BIN / "cormorant", "dataset", "verify", "data/cheetah", cwd=tmp_path)
    assert "65,536 frames" in report


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_make_run_collects_pong(tmp_path: Path) -> None:
    run("git", "clone", "--quiet", ROOT, tmp_path / "clone")
    clone = tmp_path / "clone"
    # This environment in place of a new one; installing into it again would point it at the clone.
    run("make", f"--assume-old={BIN.parent}/.installed", "run", f"VENV={BIN.parent}", cwd=clone, timeout_s=900)
    assert "make run " in blocks("README.md", "sh")[0]
    assert "200,000 frames" in run(BIN / "cormorant", "dataset", "verify", "data/pong", cwd=clone)


@pytest.mark.slow
def test_first_dataset_tutorial_runs(tmp_path: Path) -> None:
    install, *shell = blocks("docs/tutorials/first-dataset.md", "sh")
    assert "make install" in install
    out = run("bash", "-euc", "\n".join(shell), cwd=tmp_path, timeout_s=500)
    assert [int(found.replace(",", "")) for found in re.findall(r"ok, ([\d,]+) frames", out)] == [20_000, 30_000]
    assert list((tmp_path / "cartpole" / "frames").glob("*.parquet"))


@pytest.mark.slow
def test_rest_tutorial_runs(tmp_path: Path) -> None:
    page = "docs/tutorials/train-ppo-over-rest.md"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    _, second, example = blocks(page, "sh")
    (learner,) = blocks(page, "python")
    with serving(serve_line(page), tmp_path) as environment:
        shell = "\n".join(line for line in second.splitlines() if not line.startswith("export"))
        assert "frames" in run("bash", "-euc", shell, cwd=tmp_path, env=environment)
        # Entering the link publishes version 1.
        shown = blocks(page, "text")[1].splitlines()
        printed = run(sys.executable, "-c", learner, cwd=tmp_path, env=environment).splitlines()
        assert [line.partition(" return ")[0] for line in printed] == [line.partition(" return ")[0] for line in shown]
        out = run("bash", "-euc", f"{example.strip()} --quick", cwd=tmp_path, env=environment)
    assert out.splitlines()[-1].startswith("mean return of the last episodes: ")


@pytest.mark.slow
def test_learners_page_runs(tmp_path: Path) -> None:
    page = "docs/how-to/learners.md"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "my_pkg.py").write_text(MY_PKG)
    first, *others = blocks(page, "python")
    with serving(serve_line(page), tmp_path) as environment:
        first = first.replace('"http://127.0.0.1:8000"', f'"{environment["CORMORANT_URL"]}"')
        imports = others[0].partition("\nwith ")[0]
        # A process each: one that ends gives back the batch that it holds.
        for page_so_far in ([first], *([imports, block] for block in others)):
            out = run(sys.executable, "-c", RUN_BLOCKS, *page_so_far, cwd=tmp_path, env=environment, timeout_s=100)
            assert out.splitlines()[-1] == "enough", page_so_far


@pytest.mark.slow
def test_a_script_moves_from_laptop_to_cluster_by_one_line(tmp_path: Path) -> None:
    page = "docs/how-to/from-laptop-to-cluster.md"
    (script,) = blocks(page, "python")
    manifest = (ROOT / "examples" / "cartpole-ppo.yaml").read_text()
    short = re.sub(r"totalFrames: [\d_]+", "totalFrames: 8192", manifest)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "cartpole-ppo.yaml").write_text(short)
    assert run(sys.executable, "-c", script, cwd=tmp_path).splitlines()[-1].split()[0] == "8192"
    line = next(line for line in script.splitlines() if line.startswith("with cormorant.open_fleet("))
    (remote,) = re.findall(r"`(with cormorant\.connect\(\"http.*)`", (ROOT / page).read_text())
    with serving("cormorant run examples/cartpole-ppo.yaml --serve --directory head", tmp_path) as environment:
        remote = remote.replace("http://10.0.0.7:8000", environment["CORMORANT_URL"])
        moved = script.replace(line, remote.replace("tokens.json", "head/tokens.json"))
        assert run(sys.executable, "-c", moved, cwd=tmp_path, env=environment).splitlines()[-1].split()[0] == "8192"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        "index.md", "how-to/own-environment.md", "how-to/vector-environments.md", "how-to/jax-environments.md",
        "how-to/episode-metrics.md", "how-to/resume.md", "how-to/normalize.md", "reference/python.md",
    ],
)  # fmt: skip
def test_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    code = blocks(f"docs/{page}", "python")
    is_one = page == "reference/python.md"
    out = "".join(run(sys.executable, "-c", block, cwd=tmp_path) for block in (["\n".join(code)] if is_one else code))
    assert "weights version 1 is not newer than 2" in out or not is_one
    assert out.count("tensor(") == 3 or page != "index.md"


@pytest.mark.slow
def test_logging_page_writes_curves(tmp_path: Path) -> None:
    """docs/how-to/log-a-run.md but for W&B, which needs an account to be of use."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tensorboard, _ = blocks("docs/how-to/log-a-run.md", "python")
    run(sys.executable, "-c", tensorboard, cwd=tmp_path)
    curves = EventAccumulator(str(tmp_path / "runs" / "cartpole")).Reload()
    assert [event.step for event in curves.Scalars("episodes/return")] == [512, 1024, 1536]
    assert {event.value for event in curves.Scalars("collector/staleness")} == {0.0}


@pytest.mark.slow
def test_notebook_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    """docs/how-to/notebooks.md in a kernel: a policy of a cell acts in workers, an interrupt ends the cell alone."""
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))

    def cell(code: str, *, interrupted: bool = False) -> str:
        shown: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            shown.append(content.get("text") or content.get("ename") or str(content.get("data", "")))
            if interrupted and "first batch" in shown[-1]:
                manager.interrupt_kernel()

        client.execute_interactive(code, timeout=120, output_hook=hear)
        return "".join(shown)

    try:
        opened, batch, published, closed = blocks("docs/how-to/notebooks.md", "python")
        assert "Error" not in cell(opened)
        assert "policy_version" in cell(batch)
        assert "version=1" in cell(published)
        loop = "for n, batch in enumerate(fleet.batches()):\n    if n == 0: print('first batch', flush=True)"
        assert cell(loop, interrupted=True).endswith("KeyboardInterrupt")
        assert cell("print(fleet.next_batch(timeout=60) is not None, fleet.stats().restarts)").strip() == "True 0"
        first = int(cell("print(fleet.workers()[0].pid)"))
        assert "Error" not in cell(opened)
        # The traceback of the interrupted cell refers to the first fleet until another one replaces it.
        cell("1 / 0")
        cell("import gc; gc.collect()")
        psutil.Process(first).wait(60)
        assert cell(closed) == ""
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.slow
def test_reading_page_runs(tmp_path: Path) -> None:
    """docs/how-to/read-a-dataset.md, but for what needs TorchRL, which tests/peers runs."""
    run("bash", "-euc", "cormorant init . && cormorant run job.yaml", cwd=tmp_path)
    page = "docs/how-to/read-a-dataset.md"
    code = [block for block in blocks(page, "python") if "torchrl" not in block]
    run(sys.executable, "-c", "\n".join(code), cwd=tmp_path)
    out = run("bash", "-euc", "\n".join(blocks(page, "sh")), cwd=tmp_path)
    assert out.count("20,000 frames") == 4


@pytest.mark.slow
def test_ray_page_runs(tmp_path: Path) -> None:
    """docs/how-to/ray.md on a cluster of its own: an empty address starts one."""
    (tmp_path / "job.yaml").write_text(
        blocks("README.md", "yaml")[0].replace("dataset: {uri: data/cheetah}", "queue: {}")
    )
    script, driver = blocks("docs/how-to/ray.md", "python")
    for block, learning in ((script, "learn(batch)"), (driver, "update(policy, batch)")):
        own = block.replace('RayOptions(address="auto")', "RayOptions()").replace("/code/job.yaml", "job.yaml")
        run(sys.executable, "-c", own.replace(learning, "break"), cwd=tmp_path)


# -- examples/short: each fits on a screen, imports one package of ours, and does what it says -----------------

SHORT = ROOT / "examples" / "short"
SCREEN = 50


@pytest.fixture
def main_of() -> Iterator[Callable[[str], Any]]:
    """Threads of small networks wait for each other beside other work: 40 updates of PPO did not end within 300 s."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda name: runpy.run_path(str(SHORT / name))["main"]
    torch.set_num_threads(before)


@pytest.mark.parametrize("path", sorted(SHORT.glob("*.py")), ids=lambda path: path.name)
def test_it_fits_on_a_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= SCREEN


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ppo_learns(main_of) -> None:
    assert main_of("ppo.py")() > 100  # 22 at first


def test_an_evaluation_has_a_mean(main_of, capfd: pytest.CaptureFixture[str]) -> None:
    assert 8 < main_of("evaluation.py")(12) < 500
    assert "warning" not in capfd.readouterr().out, "its workers have no state to save"


def test_a_dataset_is_read_and_learned_from(main_of, tmp_path: Path) -> None:
    assert 0 < main_of("offline.py")(str(tmp_path / "data"), 2_000) < 1


@pytest.mark.slow
def test_a_learner_elsewhere_publishes(main_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(load_job(ROOT / "examples" / "cartpole-ppo.yaml"), directory=tmp_path) as served:
        monkeypatch.setenv("CORMORANT_TOKEN", served.writer.token)
        assert main_of("remote.py")(served.server.url, 3) > 0
