"""`cormorant validate FILE...`: the API server's verdict on manifests, without an API server."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from cormorant_contract.errors import ManifestError, Problem
from cormorant_contract.job import CollectorJob
from cormorant_contract.spec import unplayed
from cormorant_manifest.entrypoints import missing_entrypoints
from cormorant_manifest.reader import STDIN, load_jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """What one file holds: jobs, or problems."""

    source: str
    jobs: tuple[CollectorJob, ...] = ()
    problems: tuple[Problem, ...] = ()


def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Manifest files; - reads standard input.")],
    imports: Annotated[
        bool,
        typer.Option(
            "--imports",
            help="Also check entrypoints and their arguments against the source files, without running them.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Check CollectorJob manifests and print one line per error. Exits with 0 if all are valid, 2 otherwise."""
    verdicts = [judge(file, imports=imports) for file in dict.fromkeys(files)]
    if as_json:
        typer.echo(json.dumps(_report(verdicts), indent=2))
    else:
        for verdict in verdicts:
            _print(verdict)
    if any(verdict.problems for verdict in verdicts):
        raise typer.Exit(2)


def judge(file: str, *, imports: bool = False) -> CheckedFile:
    """Read one file; never raises for what is in it."""
    try:
        jobs = tuple(load_jobs(file))
        folder = None if file == STDIN else Path(file).resolve().parent
        found = [
            Problem(message=sentence, name=job.metadata.name, location=("spec", "env", "variants"))
            for job in jobs
            if (sentence := unplayed(job.spec))
        ]
        found += [problem for job in jobs for problem in missing_entrypoints(job, folder=folder)] if imports else []
        if found:
            return CheckedFile(source=file, problems=tuple(replace(problem, source=file) for problem in found))
        return CheckedFile(source=file, jobs=jobs)
    except ManifestError as error:
        return CheckedFile(source=file, problems=error.problems)


def _print(verdict: CheckedFile) -> None:
    for problem in verdict.problems:
        typer.echo(str(problem), err=True)
    name = "standard input" if verdict.source == STDIN else verdict.source
    for job in verdict.jobs:
        typer.echo(f"{name}: {job.metadata.name}: ok")


def _report(verdicts: list[CheckedFile]) -> dict[str, object]:
    return {
        "valid": not any(verdict.problems for verdict in verdicts),
        "files": [
            {
                "source": verdict.source,
                "jobs": [{"namespace": job.metadata.namespace, "name": job.metadata.name} for job in verdict.jobs],
                "problems": [
                    {
                        "document": problem.document,
                        "name": problem.name,
                        "line": problem.line,
                        "path": problem.path,
                        "message": problem.message,
                    }
                    for problem in verdict.problems
                ],
            }
            for verdict in verdicts
        ],
    }
