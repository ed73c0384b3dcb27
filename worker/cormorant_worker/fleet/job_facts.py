"""What a fleet reads from its manifest: where frames are kept, what runs where, and how to name it in messages."""

from typing import TYPE_CHECKING

from cormorant_contract.job import CollectorJob

if TYPE_CHECKING:
    from cormorant_worker.evaluation.book import EpisodeBook
    from cormorant_worker.fleet.dataset_root import DatasetRoot


def dataset_of(job: CollectorJob, *, epoch: int) -> "DatasetRoot | None":
    """The dataset that frames go to, looked at; None: none. `epoch`: of the fleet, unless the dataset has seen as high
    a one.
    """
    if job.spec.output.dataset is None or job.spec.collection.episodes is not None:
        return None
    # Imported by those who have a dataset: pyarrow takes a while to load.
    from cormorant_worker.fleet.dataset_root import DatasetRoot

    return DatasetRoot(job.spec.output.dataset.uri, job=job.metadata.name, epoch=epoch)


def episodes_of(job: CollectorJob) -> "EpisodeBook | None":
    """The episodes that an evaluation has still to play; None: the job collects frames."""
    if job.spec.collection.episodes is None:
        return None
    from cormorant_worker.evaluation.book import EpisodeBook

    return EpisodeBook(job)


def device_of(job: CollectorJob, group: str) -> str:
    """The torch device of a group's policies."""
    return "cuda" if any(g.name == group and g.device == "gpu" for g in job.spec.worker_groups) else "cpu"


def serves(job: CollectorJob, group: str) -> bool:
    """Whether a group's members are inference servers."""
    return any(g.name == group and g.serves for g in job.spec.worker_groups)


def describe_env(job: CollectorJob) -> str:
    env = job.spec.env
    if env.envpool is not None:
        return f"EnvPool's {env.envpool.task_id} with kwargs {dict(env.envpool.kwargs)}"
    assert env.gymnasium is not None
    return f"{env.gymnasium.id or env.gymnasium.entrypoint} with kwargs {dict(env.gymnasium.kwargs)}"
