"""`cormorant validate FILE...`: the API server's verdict on manifests, without an API server."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cormorant_cli.printing import speaks_json, tell
from cormorant_contract.errors import ManifestError, Problem
from cormorant_contract.job import CollectorJob
from cormorant_contract.spec import unplayed
from cormorant_manifest.entrypoints import missing_entrypoints
from cormorant_manifest.reader import STDIN, load_jobs

Verdict = tuple[Sequence[CollectorJob], Sequence[Problem]]
"""Jobs in one file, or its problems."""


def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Manifest files; - reads standard input.")],
    imports: Annotated[
        bool,
        typer.Option(
            "--imports",
            help="Also check entrypoints and their arguments against the source files, without running them.",
        ),
    ] = False,
) -> None:
    """Check CollectorJob manifests and print one line per error. Exits with 0 if all are valid, 2 otherwise."""
    verdicts = {file: judge(file, imports=imports) for file in dict.fromkeys(files)}
    found = [problem for _, problems in verdicts.values() for problem in problems]
    if not speaks_json():
        for problem in found:
            typer.echo(str(problem), err=True)
    passed = [
        ("standard input" if file == STDIN else file, job.metadata.name)
        for file, (jobs, _) in verdicts.items()
        for job in jobs
    ]
    tell(_report(verdicts), *(f"{source}: {name}: ok" for source, name in passed))
    if found:
        raise typer.Exit(2)


def judge(file: str, *, imports: bool = False) -> Verdict:
    """Read one file; never raises because of its content."""
    try:
        jobs = load_jobs(file)
    except ManifestError as error:
        return (), error.problems
    folder = None if file == STDIN else Path(file).resolve().parent
    found = [
        Problem(message=sentence, name=job.metadata.name, location=("spec", "env", "variants"))
        for job in jobs
        if (sentence := unplayed(job.spec))
    ]
    found += [problem for job in jobs for problem in missing_entrypoints(job, folder=folder)] if imports else []
    return ((), [replace(problem, source=file) for problem in found]) if found else (jobs, ())


def _report(verdicts: Mapping[str, Verdict]) -> dict[str, object]:
    return {
        "valid": not any(problems for _, problems in verdicts.values()),
        "files": [
            {
                "source": file,
                "jobs": [{"namespace": job.metadata.namespace, "name": job.metadata.name} for job in jobs],
                "problems": [
                    {
                        "document": problem.document,
                        "name": problem.name,
                        "line": problem.line,
                        "path": problem.path,
                        "message": problem.message,
                    }
                    for problem in problems
                ],
            }
            for file, (jobs, problems) in verdicts.items()
        ],
    }
