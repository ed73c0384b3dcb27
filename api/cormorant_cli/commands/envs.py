"""`cormorant envs [PATTERN]`: environments that this install can build. Imports the worker in its body, like `run`."""

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from cormorant_cli.errors import BadInput, installed
from cormorant_cli.printing import tell
from cormorant_contract.sentences import near

Engine = Literal["envpool", "gymnasium"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvEntry:
    engine: Engine
    """The block of `spec.env` for this environment."""
    id: str
    observation: str = ""
    action: str = ""
    missing: str = ""
    """Why it cannot be built here; empty if it can, or if not checked."""


def envs(
    pattern: Annotated[str, typer.Argument(help="Part of a name, or a pattern with * and ?. Case-insensitive.")] = "",
    spaces: Annotated[
        bool, typer.Option("--spaces", help="Also show spaces, and why an environment cannot be built here.")
    ] = False,
) -> None:
    """List the environments that this install can build. With --json: JSON Lines, one object per environment."""
    known = _known()
    found = matching(known, pattern)
    if not found:
        # The pattern may omit the version.
        names = {entry.id.rpartition("-v")[0]: entry.id for entry in known} | {entry.id: entry.id for entry in known}
        close = list(dict.fromkeys(names[name] for name in near(pattern.strip("*?"), names, most=6)))[:3]
        hint = f"did you mean {' or '.join(close)}?" if close else "`cormorant envs` without a pattern lists all"
        raise BadInput(f'no environment matches "{pattern}"; {hint}')
    for entry in _with_spaces(found) if spaces else found:
        tell(entry, _line(entry), indent=None)


def matching(entries: Iterable[EnvEntry], pattern: str) -> list[EnvEntry]:
    """The entries whose id contains the pattern, or matches its wildcards."""
    wanted = pattern.lower()
    if not any(character in wanted for character in "*?["):
        wanted = f"*{wanted}*"
    return [entry for entry in entries if fnmatch.fnmatchcase(entry.id.lower(), wanted)]


def _known() -> list[EnvEntry]:
    with installed("worker"):
        import gymnasium

        from cormorant_worker.envs.envpool import task_ids
    return [
        *(EnvEntry(engine="envpool", id=name) for name in task_ids()),
        *(EnvEntry(engine="gymnasium", id=name) for name in sorted(gymnasium.registry)),
    ]


def _with_spaces(entries: Iterable[EnvEntry]) -> Iterator[EnvEntry]:
    from cormorant_worker.envs.envpool import EnvPoolTask
    from cormorant_worker.envs.gymnasium_env import EnvFactory
    from cormorant_worker.errors import EnvError
    from cormorant_worker.spaces import describe

    for entry in entries:
        try:
            if entry.engine == "envpool":
                observation, action = EnvPoolTask(task_id=entry.id, kwargs={}).spaces()
            else:
                env = EnvFactory(id=entry.id).build()
                observation, action = env.observation_space, env.action_space
                env.close()
        except EnvError as error:
            yield EnvEntry(engine=entry.engine, id=entry.id, missing=str(error))
        else:
            yield EnvEntry(engine=entry.engine, id=entry.id, observation=describe(observation), action=describe(action))


def _line(entry: EnvEntry) -> str:
    name = f"{entry.engine:<9}  {entry.id}"
    if entry.missing:
        return f"{name}  missing: {' '.join(entry.missing.split())}"
    return f"{name}  {entry.observation} -> {entry.action}" if entry.observation else name
