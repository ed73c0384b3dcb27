"""`evaluate`: an evaluation on this machine or a Ray cluster. Also called by the command line."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cormorant_contract import errors as contract
from cormorant_contract.fleet import Stats
from cormorant_contract.job import CollectorJob
from cormorant_contract.parsing import parse_job
from cormorant_contract.weights import Publishable, file_of
from cormorant_worker.collect.overrides import NO_OVERRIDES, read_overrides
from cormorant_worker.errors import EvaluationError, ManifestError
from cormorant_worker.evaluation.results import ResultTable
from cormorant_worker.launch import Manifest, describe_job, engine_of, refuse_unknown_names
from cormorant_worker.scripted import SCRIPT_ENV, EnvChoice, PolicyChoice, Vectorization
from cormorant_worker.weights.blob import in_models, to_bytes

if TYPE_CHECKING:
    from cormorant_worker.fleet.options import RayOptions
    from cormorant_worker.fleet.stats import FleetStats
    from cormorant_worker.fleet.transport import Engine

Files = list[str | Path] | tuple[str | Path, ...]
_LOOK_S = 0.2
_KEPT = frozenset({"seed", "episodes", "episodeMetrics", "normalize"})
"""Fields of `collection` that an evaluation reads."""
_KEPT_OF_EPISODES = frozenset({"deterministic", "perTask", "checkpoints"})
"""Fields of `collection.episodes` that another list of episodes leaves as they are."""


def evaluate(
    manifest: Manifest | None = None,
    weights: Publishable | Files | None = None,
    *,
    env: EnvChoice | None = None,
    policy: PolicyChoice | None = None,
    policy_factory: Callable[..., Any] | None = None,
    num_envs: int | None = None,
    vectorization_mode: Vectorization | None = None,
    collection: Mapping[str, Any] | None = None,
    info: Sequence[str | Mapping[str, Any]] | None = None,
    episodes: int | Sequence[int] | None = None,
    seed: int | None = None,
    deterministic: bool | None = None,
    workers: int | None = None,
    directory: str | Path | None = None,
    device: str | None = None,
    engine: "RayOptions | None" = None,
    look: Callable[[Stats], None] = lambda stats: None,
    videos: int = 0,
) -> ResultTable:
    """Play episodes, each exactly once, and return their table. It is bit for bit the same for any number of workers,
    even if processes are killed and the call is repeated.

        table = evaluate("job.yaml", "policy.safetensors", episodes=100)
        table.summary["return"]["mean"]
        table = evaluate(env=MyEnv, policy=network, episodes=100)     # without a manifest

    Args:
        manifest: path of a YAML file, a mapping, or a CollectorJob; from its `collection` only `seed`, `episodes`,
            `episodeMetrics` and `normalize` are used.
        weights: the policy's weights, as in `Fleet.publish`, or the fsspec URI of a file, or a list of them, which are
            the `checkpoints`; None: the manifest's `initialWeights` or checkpoints, or what its factory makes.
        env: as in `open_fleet`. This and the arguments down to `info` replace the manifest.
        policy: as in `open_fleet`; None: random actions.
        policy_factory: makes the policy from the spaces.
        num_envs: episodes that one worker plays side by side; None: 8.
        vectorization_mode: subprocess, the default: one process per environment; inline: all in the worker process.
        collection: further fields of `spec.collection`: `episodeMetrics`, `normalize`.
        info: keys of the environments' info that metrics read.
        episodes: how many, with seeds from `seed` on, or their seeds; None: the manifest's `collection.episodes`.
        seed: seed of the first episode; None: the manifest's. Refused if `episodes` is a list of seeds.
        deterministic: the policy's best actions instead of sampled ones; None: as in the manifest's
            `collection.episodes`, else True.
        workers: worker processes; None: one per CPU, at most one per episode.
        directory: keeps every episode's result from the moment it ends, so that the same call continues after a kill.
            A path or any fsspec URI; None: a temporary folder. With `env`, a call continues from the results of calls
            whose environment and policy are pickled to the same bytes.
        device: torch device of the policy; None: as in the worker groups.
        engine: as in `open_fleet`. Workers on other machines need a `directory` that all can write.
        look: called about five times a second with statistics; their `frames` count episodes.
        videos: number of first episodes to record as MP4 in `directory`, with imageio-ffmpeg.

    Raises:
        ManifestError: the manifest is refused.
        DatasetError, EvaluationError: the folder cannot be used, or an episode was played twice with two results.
        WeightsError: a weights file cannot be read.
        WorkerFailed, EnvError: weights do not fit the policy; an environment or the policy fails.
    """
    if videos and (not directory or "://" in str(directory)):
        raise EvaluationError("videos need a folder of this machine; pass directory=")
    if engine is not None and not directory:
        raise EvaluationError("workers on other machines need a folder that all can write; pass directory=")
    kept = nullcontext(str(directory)) if directory else tempfile.TemporaryDirectory(prefix="cormorant-evaluation-")
    with kept as folder, _weights_files(weights) as uris:
        described, overrides = describe_job(
            manifest, env, policy=policy, policy_factory=policy_factory, num_envs=num_envs,
            vectorization_mode=vectorization_mode, collection=collection, info=info,
        )  # fmt: skip
        objects = b""
        if overrides is NO_OVERRIDES:
            refuse_unknown_names(described, is_this_machine=engine is None)
        else:
            overrides = replace(overrides, envs=overrides.envs[:1])  # each episode has a new one
            if overrides.envs or overrides.policy is not None or overrides.policy_factory is not None:
                objects = overrides.to_bytes()
        job = evaluation_job(
            described, folder, weights=uris, episodes=episodes, seed=seed, deterministic=deterministic,
            device=str(device or ""), objects=objects,
        )  # fmt: skip
        table = run_evaluation(
            job,
            workers=workers,
            device=None if device is None else str(device),
            engine=engine_of(engine),
            look=lambda stats: look(stats.summary()),
            objects=objects,
        )
        if videos:
            from cormorant_worker.evaluation.player import record_videos

            record_videos(job, table, videos, Path(folder) / "videos", overrides=read_overrides(objects))
        return table


def evaluation_job(
    job: CollectorJob,
    folder: str,
    *,
    weights: Sequence[str] = (),
    episodes: int | Sequence[int] | None = None,
    seed: int | None = None,
    deterministic: bool | None = None,
    device: str = "",
    objects: bytes = b"",
) -> CollectorJob:
    """A copy of a manifest with the changes for an evaluation, whose results go to `folder`. `weights`: URIs of files;
    empty: as in the manifest; `objects`: a script's environment and policy, pickled, which are evaluated in place of
    the manifest's; all else as in `evaluate`. Raises ManifestError with the arguments that conflict.
    """
    document = job.to_document()
    spec = document["spec"]
    collection = {name: value for name, value in spec["collection"].items() if name in _KEPT}
    collection["framesPerBatch"] = job.spec.env.num_envs
    collection["episodes"] = dict(collection.get("episodes") or {})
    if episodes is not None:
        given: dict[str, Any] = (
            {"seeds": [*map(index, episodes)]} if isinstance(episodes, Iterable) else {"count": index(episodes)}
        )
        kept = {name: value for name, value in collection["episodes"].items() if name in _KEPT_OF_EPISODES}
        collection["episodes"] = {**kept, **given}
    elif not collection["episodes"]:
        raise ManifestError(
            f"{job.metadata.name} has no collection.episodes; say how many to play: episodes=100, or --episodes 100"
        )
    if seed is not None:
        if own := collection["episodes"].get("seeds"):
            raise ManifestError(
                f"seed {seed} is the seed of the first episode of a count, and these episodes have a list of "
                f"{len(own)} seeds; leave seed out"
            )
        collection["seed"] = seed
    if deterministic is not None:
        collection["episodes"]["deterministic"] = deterministic
    if job.spec.is_served:
        spec.pop("inference", None)
        spec["workerGroups"] = [group for group in spec["workerGroups"] if group.get("role") != "inference"]
    if device:
        kind = "cpu" if device.startswith("cpu") else "gpu"
        spec["workerGroups"] = [{**group, "device": kind} for group in spec["workerGroups"]]
    if objects:
        # The digest is part of a placeholder, which is never called: the environment's, or else the policy's.
        digest = hashlib.sha256(objects).hexdigest()
        blocks = (block for block in spec["env"].values() if isinstance(block, dict))
        if block := next((block for block in blocks if block.get("entrypoint") == SCRIPT_ENV), None):
            block["entrypoint"] = f"{SCRIPT_ENV}_{digest}"
        else:
            spec["policy"]["kwargs"] = {"objects": digest}
    if weights:
        is_list = len(weights) > 1 or job.spec.policy.agents is not None
        spec["policy"]["initialWeights"] = "" if is_list else weights[0]
        collection["episodes"]["checkpoints"] = [*weights] if is_list else None
    spec["collection"], spec["output"] = collection, {"dataset": {"uri": folder}}
    try:
        return parse_job(document)
    except contract.ManifestError as error:
        raise ManifestError(str(error)) from error


def run_evaluation(
    job: CollectorJob,
    *,
    workers: int | None = None,
    device: str | None = None,
    engine: "Engine | None" = None,
    look: "Callable[[FleetStats], None]" = lambda stats: None,
    objects: bytes = b"",
) -> ResultTable:
    """Play the missing episodes of an evaluation, and write its table to its folder. `look` gets the fleet's counters
    about five times a second; `objects`: `WorkerOverrides.to_bytes()` of a script; all else as in `evaluate`.
    """
    from cormorant_worker.envs.cpus import available_cpus
    from cormorant_worker.evaluation.results import EpisodeBook
    from cormorant_worker.fleet.fleet import WorkerFleet
    from cormorant_worker.fleet.options import FleetOptions

    book = EpisodeBook(job)
    if book.pending:
        workers = available_cpus() if workers is None else workers
        options = FleetOptions(workers=workers, device=device, overrides=(objects,) if objects else ())
        options = replace(options, workers=min(workers, len(book.pending)))
        with WorkerFleet(job, options, engine=engine) as fleet:
            while not fleet.wait_until_done(_LOOK_S):
                look(fleet.stats())
            look(fleet.stats())
    return book.finish()


@contextmanager
def _weights_files(weights: Publishable | Files | None) -> Iterator[tuple[str, ...]]:
    if weights is None:
        yield ()
    elif isinstance(weights, str | os.PathLike | list | tuple):
        files = weights if isinstance(weights, list | tuple) else [weights]
        if not files:
            raise ManifestError("weights is an empty list; name files, or leave it out")
        yield tuple(str(file) if "://" in str(file) else str(Path(file).resolve()) for file in files)
    else:
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            file.write(data if (data := file_of(weights)) is not None else to_bytes(in_models(weights)))
            file.flush()
            yield (file.name,)
