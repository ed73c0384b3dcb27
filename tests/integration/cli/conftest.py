"""Manifests for `cormorant`, and `cormorant` in a process of its own, in a folder of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cormorant_testing.commands import Command, Started, Written
from manifest_making import manifest


@pytest.fixture
def write(tmp_path: Path) -> Written:
    """Write `job.yaml`: random actions in four CartPoles without an end, but for what is given."""

    def to_file(**spec: Any) -> Path:
        spec = {"env": {"envpool": {"taskId": "CartPole-v1", "numEnvs": 4, "numThreads": 1}}} | spec
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(manifest("small", **spec)))
        return path

    return to_file


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    """Start `cormorant` with arguments in the test's folder; whatever still runs at the end is killed."""
    commands: list[Command] = []

    def begin(*arguments: str) -> Command:
        commands.append(Command(*arguments, cwd=tmp_path))
        return commands[-1]

    yield begin
    for command in commands:
        if command.process.poll() is None:
            for process in [*command.children(), command.process]:
                process.kill()
            command.process.communicate()
