"""`cormorant evaluate MANIFEST`: play a fixed list of episodes with one or more checkpoints, on this machine or a Ray
cluster. `cormorant evaluate JOB`: the table of an evaluation that runs on a cluster.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cormorant_cli.commands import run
from cormorant_cli.connection import RECONNECT_S, CaFile, Connection, Context, Namespace, Token, TokenFile, Url
from cormorant_cli.errors import BadInput, CommandFailed, HeadGone, Interrupted, NotReady
from cormorant_cli.printing import columns_of, speaks_json, tell, told_when_slow
from cormorant_cli.progress import choose_display
from cormorant_contract.episodes import files_of
from cormorant_manifest.reader import STDIN

if TYPE_CHECKING:
    from cormorant_contract.fleet import Stats

Row = tuple[str | Mapping[str, str], Mapping[str, Any]]
"""A weights file, or that of each group of agents, and the summary of its episodes."""
_TOLD_S = 1.0
_POLL_S, _AGAIN_S = 0.5, 1.0
_OWN = "weights of the manifest"


def evaluate(
    manifest: Annotated[
        str,
        typer.Argument(
            metavar="[MANIFEST|JOB]",
            help="CollectorJob manifest in YAML (- reads standard input), or an evaluation's job in the cluster.",
        ),
    ] = "",
    weights: Annotated[
        list[str] | None,
        typer.Option(help="Safetensors file to evaluate; repeat it for a sweep (default: the manifest's weights)."),
    ] = None,
    episodes: Annotated[
        int, typer.Option(min=0, help="Number of episodes (0: collection.episodes of the manifest).")
    ] = 0,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of the first episode; the next has the next (default: the manifest's)."),
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--sample", help="Play the policy's best actions, or draw them (default: deterministic)."
        ),
    ] = None,
    output: Annotated[
        str,
        typer.Option(help="Folder or URI that keeps results; an interrupted run goes on there (default: none)."),
    ] = "",
    video: Annotated[
        int, typer.Option(min=0, help="Record the first N episodes of each checkpoint as MP4 in --output.")
    ] = 0,
    workers: Annotated[int, run.WORKERS(min=0, help="Number of workers (0: one per core).")] = 0,
    device: run.DeviceOption = "auto",
    fleet: run.FleetOption = "local",
    ray_address: run.RayAddress = "",
    wait: Annotated[
        float,
        typer.Option(
            min=0, rich_help_panel="A running job", help="With JOB: seconds to wait for its start and its end."
        ),
    ] = 0.0,
    namespace: Namespace = "",
    context: Context = "",
    url: Url = "",
    token: Token = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
) -> None:
    """Evaluate checkpoints: play each episode exactly once and print a table, one line per checkpoint. With JOB, show
    the table of an evaluation in the cluster.

    The table is bit for bit the same for any number of workers. With --output, evaluation.json and episodes.parquet
    are written, and an interrupted run continues where it was. --json prints JSON Lines: one object per checkpoint.
    Exits with 0 when all episodes are played, 1 when an environment or the policy failed, 2 when the manifest, an
    option or a weights file cannot be used, 130 when interrupted.
    """
    # Otherwise it is the name of a job.
    is_file = manifest == STDIN or Path(manifest).suffix in (".yaml", ".yml", ".json") or Path(manifest).exists()
    if not manifest or not is_file:
        if weights or episodes or seed is not None or deterministic is not None or output or video:
            raise BadInput(
                f"{manifest or url} runs already with what its manifest says; give a manifest, or no options"
            )
        connection = Connection(
            job=manifest,
            namespace=namespace,
            context=context,
            url=url,
            token=token,
            token_file=token_file,
            ca_file=ca_file,
        )
        show_running(connection, wait_s=wait)
        return
    if video and not output:
        raise BadInput("--video needs a folder for its files; give --output")
    if video and "://" in output:
        raise BadInput(f"--video needs a folder of this machine for its files, and --output {output} is a URI")
    job = run.read_job(manifest)
    runs: dict[tuple[str, ...], str] = {(uri,): folder for uri, folder in _folders(weights or [""], output).items()}
    if job.spec.policy.agents is not None and weights:
        runs = {tuple(weights): output}  # every pairing of them
    rows: list[Row] = []
    try:
        with run.translated_errors(), run.logged_to(choose_display()):
            from cormorant_worker.run_evaluation import evaluate as play

            for uris, folder in runs.items():
                table = play(
                    job,
                    uris if uris[0] else None,
                    episodes=episodes or None,
                    seed=seed,
                    deterministic=deterministic,
                    workers=workers or None,
                    directory=folder or None,
                    device=None if device == "auto" else device,
                    engine=run.ray_options(fleet, ray_address),
                    look=_teller(" ".join(Path(uri).name for uri in uris)),
                    videos=video,
                )
                for name, each in (table.checkpoints or {uris[0]: table}).items():
                    shown = files_of(name) or name
                    tell({"weights": shown, **each.document()}, indent=None)
                    rows.append((shown or _OWN, each.summary))
    except KeyboardInterrupt:
        hint = f"; run it again with --output {output} to continue" if output else ""
        raise Interrupted(f"interrupted{hint}") from None
    finally:
        if rows and not speaks_json():
            typer.echo(show_table(rows))


def show_running(connection: Connection, *, wait_s: float) -> None:
    """Print the table of a running job so far."""
    deadline, said = time.monotonic() + wait_s, ""
    with told_when_slow(f"until all episodes are played, at most {wait_s:g} s" if wait_s else "for the table"):
        while True:
            try:
                with connection.client("read", reconnect_s=min(wait_s or RECONNECT_S, RECONNECT_S)) as client:
                    while len((state := client.evaluation()).episodes) < state.planned and time.monotonic() < deadline:
                        time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))
                break
            except NotReady as error:
                if isinstance(error, HeadGone) or not wait_s:
                    raise
                if time.monotonic() >= deadline:
                    raise CommandFailed(f"no table after {wait_s:g} s: {error}") from error
                if said != (said := str(error)):
                    typer.echo(said, err=True)
                time.sleep(min(_AGAIN_S, max(0.0, deadline - time.monotonic())))
    document = state.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    tables = [document]
    if (checkpoints := document.pop("checkpoints", None)) is not None:
        # One table per weights file, equal to that of the file's own evaluation.
        played: dict[str, list[dict[str, Any]]] = {}
        for row in document["episodes"]:
            played.setdefault(row.pop("checkpoint"), []).append(row)
        tables = [{"weights": files_of(uri) or uri, **own, "episodes": played[uri]} for uri, own in checkpoints.items()]
    for table in tables:
        tell(table, indent=None)
    if len(state.episodes) < state.planned:
        typer.echo(f"{len(state.episodes)} of {state.planned} episodes are played", err=True)
    if state.episodes and not speaks_json():
        name = connection.job or connection.url
        typer.echo(show_table([(table.get("weights", name), table["summary"]) for table in tables]))


def show_table(rows: Sequence[Row]) -> str:
    """One line per checkpoint or pairing; means with their 95 % intervals. A pairing has the returns of each group in
    place of their sum.
    """
    lines: list[dict[str, str]] = []
    for name, summary in rows:
        if isinstance(name, Mapping):
            line = {group.upper(): uri for group, uri in name.items()} | {"EPISODES": str(summary["episodes"])}
            for group, own in sorted(summary.get("groups", {}).items()):
                line[f"{group.upper()}.RETURN"] = _mean(own["return"])
                line[f"{group.upper()}.W/D/L"] = "/".join(
                    str(own.get(what, "-")) for what in ("wins", "draws", "losses")
                )
        else:
            line = {"CHECKPOINT": name, "EPISODES": str(summary["episodes"]), "RETURN": _mean(summary["return"])}
        line["LENGTH"] = _mean(summary["length"])
        if success := summary.get("success"):
            line["SUCCESS"] = f"{success['rate']:.1%} [{success['low']:.1%}, {success['high']:.1%}]"
        line |= {f"METRICS.{metric.upper()}": _mean(spread) for metric, spread in summary.get("metrics", {}).items()}
        lines.append(line)
    titles = dict.fromkeys(title for line in lines for title in line)
    return columns_of([[*titles], *([line.get(title, "-") for title in titles] for line in lines)])


def _mean(spread: Mapping[str, float]) -> str:
    return f"{spread['mean']:.2f} ± {spread['high'] - spread['mean']:.2f}"


def _folders(weights: Sequence[str], output: str) -> dict[str, str]:
    if not output or len(weights) == 1:
        return dict.fromkeys(weights, output)
    for depth in (1, 2, 3):
        names = ["-".join(Path(uri).with_suffix("").parts[-depth:]) for uri in weights]
        if len(set(names)) == len(names):
            return {uri: f"{output.removesuffix('/')}/{name}" for uri, name in zip(weights, names, strict=True)}
    raise BadInput(f"the checkpoints' names are the same: {', '.join(weights)}; evaluate them one by one")


def _teller(name: str) -> Callable[["Stats"], None]:
    told = [0.0]

    def tell(stats: "Stats") -> None:
        if sys.stderr.isatty() and time.monotonic() >= told[0] + _TOLD_S:
            told[0] = time.monotonic()
            sys.stderr.write(f"\r\x1b[K{name}  {stats.frames} of {stats.total_frames} episodes")
            if stats.frames == stats.total_frames:
                sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    return tell
