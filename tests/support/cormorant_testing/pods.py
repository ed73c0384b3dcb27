"""Supervisors of pods as processes of this machine: a head and workers, each with a Ray node of its own."""

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import psutil

from cormorant_testing.scripts import Logged, environment, of_session
from cormorant_testing.serving import Api

TOKEN = "0123456789abcdef0123456789abcdef"


class Pod(Logged):
    """A supervisor and all below it."""

    def __init__(self, *arguments: str, **more: str) -> None:
        # Ray puts sockets there, whose paths are short.
        self.folder = tempfile.mkdtemp(prefix="pod-")
        own = {"POD_IP": "127.0.0.1", "CORMORANT_RAY_FOLDER": f"{self.folder}/ray"}
        ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "CORMORANT_OBJECT_STORE_BYTES": f"{100 << 20}"}
        command = [sys.executable, "-m", "cormorant_worker.supervisor", *arguments]
        super().__init__(command, env=environment(**own | ray | more), start_new_session=True)

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def get(self, path: str) -> tuple[int, str]:
        reply = Api(self.wait_for("supervising")["probe_port"]).get(path)
        return reply.status, reply.body.decode()

    def below(self, title: str) -> list[psutil.Process]:
        """Processes below the supervisor whose command line has this in it."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if title in " ".join(process.cmdline()[:1]):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def left(self) -> list[str]:
        """Processes of the pod that are still there."""
        return [process.name() for process in of_session(self.process.pid)]

    def kill(self) -> None:
        """As a node's failure does: everything at once."""
        for process in of_session(self.process.pid):
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)
        self.close()


def worker_pod(gcs_port: int, slot: str = "cpu-0", **more: str) -> Pod:
    group, _, index = slot.rpartition("-")
    given = {
        "CORMORANT_HEAD": f"127.0.0.1:{gcs_port}", "CORMORANT_GROUP": group, "CORMORANT_INDEX": index,
        "CORMORANT_GRACE_SECONDS": "30", "CORMORANT_PROBE_PORT": "0",
    }  # fmt: skip
    return Pod("worker", **given | more)


def head_pod(gcs_port: int, *command: str, **more: str) -> Pod:
    """A head's pod; without a command it only keeps Ray."""
    command = command or (sys.executable, "-c", "import time; time.sleep(600)")
    return Pod("head", "--", *command, CORMORANT_GCS_PORT=str(gcs_port), **more)


def tokens_file(folder: Path) -> Path:
    """A token file as the operator's Secret is mounted."""
    path = folder / "tokens.json"
    path.write_text(json.dumps({role: f"{role}-{TOKEN}" for role in ("read", "write", "operator")}))
    path.chmod(0o600)
    return path
