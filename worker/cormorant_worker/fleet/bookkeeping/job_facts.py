"""What a fleet reads from its manifest: where frames are kept, and how to name its environment in messages."""

from typing import TYPE_CHECKING

from cormorant_contract.job import CollectorJob

if TYPE_CHECKING:
    from cormorant_worker.evaluation.book import EpisodeBook
    from cormorant_worker.fleet.bookkeeping.dataset_root import DatasetRoot


def dataset_of(job: CollectorJob, *, epoch: int) -> "DatasetRoot | None":
    """The dataset that frames go to, looked at; None: none. `epoch`: of the fleet, unless the dataset has seen as high
    a one.
    """
    if job.spec.output.dataset is None or job.spec.collection.episodes is not None:
        return None
    # Imported by those who have a dataset: pyarrow takes a while to load.
    from cormorant_worker.fleet.bookkeeping.dataset_root import DatasetRoot

    return DatasetRoot(job.spec.output.dataset.uri, job=job.metadata.name, epoch=epoch)


def episodes_of(job: CollectorJob) -> "EpisodeBook | None":
    """The episodes that an evaluation has still to play; None: the job collects frames."""
    if job.spec.collection.episodes is None:
        return None
    from cormorant_worker.evaluation.book import EpisodeBook

    return EpisodeBook(job)


def describe_env(job: CollectorJob) -> str:
    env = job.spec.env
    if env.envpool is not None:
        return f"EnvPool's {env.envpool.task_id} with kwargs {dict(env.envpool.kwargs)}"
    assert env.gymnasium is not None
    return f"{env.gymnasium.id or env.gymnasium.entrypoint} with kwargs {dict(env.gymnasium.kwargs)}"
