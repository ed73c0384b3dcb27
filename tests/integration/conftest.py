"""`cormorant` in a process of its own, in a folder of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cormorant_testing.commands import Command, Started


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
