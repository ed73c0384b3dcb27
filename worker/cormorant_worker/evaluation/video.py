"""Videos of an evaluation's episodes. Recording plays an episode again, which gives the same result because an episode
is a pure function.
"""

from pathlib import Path

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.build import build_collector
from cormorant_worker.collect.overrides import NO_OVERRIDES, WorkerOverrides
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import EvaluationError
from cormorant_worker.evaluation.player import Player, alone
from cormorant_worker.evaluation.results import ResultTable


def record_videos(
    job: CollectorJob, table: ResultTable, count: int, folder: Path, *, overrides: WorkerOverrides = NO_OVERRIDES
) -> list[Path]:
    """Record the first episodes of a table as MP4, one file each. Raises EvaluationError without imageio-ffmpeg, or
    where an episode ends differently while it is recorded; EnvError where the environment does not render.
    """
    try:
        import imageio_ffmpeg  # noqa: F401  # asked for before anything is played
    except ModuleNotFoundError as error:
        raise EvaluationError(
            "videos need imageio-ffmpeg, which is not installed: pip install 'cormorant[video]'"
        ) from error
    collector = build_collector(alone(job), WorkerPlace(seed=job.spec.collection.seed), overrides).collector
    collector.close()
    player, files = Player(job, collector, overrides=overrides), []
    for position, row in enumerate(table.episodes[:count]):
        path = folder / f"{row.task or 'episode'}-{position}-seed-{row.seed}.mp4"
        folder.mkdir(parents=True, exist_ok=True)
        player.film = path
        (played,) = player.play([position])
        if (played.total, played.length) != (row.total, row.length):
            raise EvaluationError(
                f"the episode with seed {row.seed} returned {row.total!r} in {row.length} steps, and {played.total!r} "
                f"in {played.length} while it was recorded: the environment acts differently when it renders"
            )
        files.append(path)
    return files
