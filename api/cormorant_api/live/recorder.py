"""Records a fleet without a head, for the report of its run."""

from cormorant_api.head import Head
from cormorant_api.http.tokens import HeadTokens
from cormorant_api.live.moments import Moments
from cormorant_api.live.report import make_report
from cormorant_api.settings import HeadSettings
from cormorant_contract.job import CollectorJob
from cormorant_worker.fleet.fleet import WorkerFleet


class Recorder:
    """The history of one fleet. Use as a context manager while it runs."""

    def __init__(self, job: CollectorJob, fleet: WorkerFleet) -> None:
        """Start recording. Raises HeadFault if the OTEL_* variables require a package that is not installed."""
        if job.spec.paused:  # a local run starts at once
            job = job.model_copy(update={"spec": job.spec.model_copy(update={"paused": False})})
        self.head = Head(job, HeadSettings(), HeadTokens(None))
        self.head.has_queue = False  # the run itself is the consumer of its fleet's queue
        self.moments = Moments(self.head)
        self.head.watchers.append(self.moments.observe)
        self.head.attach(fleet, is_paused=False)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            self.head.failure = self.head.failure or str(error)
        self.head.close()


def report_of(moments: Moments) -> str:
    """The report of a run that has ended, or of one that still runs."""
    head = moments.head
    return make_report(
        moments.now(head.running.fleet.stats()).model_dump_json(), state=head.end_state, reason=head.failure
    )
