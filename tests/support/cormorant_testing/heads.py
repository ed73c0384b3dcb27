"""`python -m cormorant_api` in a process of its own."""

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from cormorant_contract.job import CollectorJob
from cormorant_testing.scripts import Logged, environment
from cormorant_testing.serving import Api
from manifest_making import collector_job

START_S = 120


def write_manifest(folder: Path, task: str, *, env: Any = (), spec: Any = (), **collection: Any) -> Path:
    """A job of an EnvPool task that needs no consumer, as a file; `env` and `spec` are added to what it says."""
    whole = {
        "env": {"envpool": {"taskId": task, "numEnvs": 4, "numThreads": 1}, **dict(env)},
        "policy": {"entrypoint": f"cormorant.policies:{'mlp' if task.startswith('CartPole') else 'atari_cnn'}"},
        "collection": {"framesPerBatch": 64, "seed": 7, **collection},
        "output": {"queue": {"capacityBatches": 4, "onFull": "drop_oldest"}},
        "replicas": 2,
        **dict(spec),
    }
    path = folder / f"{task}.yaml"
    path.write_text(yaml.safe_dump(collector_job(task.partition("-")[0].lower(), whole, namespace="team-a")))
    return path


class HeadProcess(Logged):
    wait_s = START_S

    def __init__(
        self, job: Path | CollectorJob, directory: Path, *options: str, module: Sequence[str] = ("cormorant_api",)
    ) -> None:
        """`job`: its manifest, or the job itself, which is written beside the directory."""
        self.directory = directory
        manifest = job if isinstance(job, Path) else directory.with_suffix(".yaml")
        if not isinstance(job, Path):
            manifest.write_text(yaml.safe_dump(job.to_document()))
        command = [
            sys.executable, "-m", *module, "--job", str(manifest), "--port", "0",
            "--directory", str(directory), "--workers", "1", "--linger-seconds", "0.5", *options,
        ]  # fmt: skip
        super().__init__(command, env=environment())

    def api(self, role: str = "operator") -> Api:
        """Waits until it is ready."""
        ready = self.wait_for("head_ready")
        tokens = json.loads(Path(ready["token_file"]).read_text())
        return Api(int(ready["url"].rpartition(":")[2]), tokens[role])

    def end(self, number: int = signal.SIGTERM, *, timeout_s: float = 60) -> int:
        """Send a signal and wait for the exit code, and for the workers' ends: they notice also a kill -9."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        code = super().end(number, timeout_s=timeout_s)
        _, alive = psutil.wait_procs(children, timeout=START_S)
        assert alive == [], "workers outlive their head"
        self.close()
        return code
