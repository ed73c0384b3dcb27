"""Labels of all metrics. None of them grows with time: no ids, no versions, no addresses."""

from cormorant_contract.metrics.metric import Label

MOST_GROUPS = 8
ACTIVITIES = ("env", "inference", "transfer", "weights", "store", "idle", "paused", "build")
"""What a worker's time goes to, in the order in which workers tell it."""
DROP_REASONS = ("crash", "stale", "drop_oldest", "drain", "restore", "seed", "stale_for_consumer")
UPDATE_RESULTS = ("applied", "partially_applied", "failed", "superseded", "rejected")
UPDATE_STAGES = ("receive", "verify", "distribute", "apply", "total")
HEAD_STATES = ("starting", "running", "paused", "draining", "completing", "completed", "failed")

COLLECTORJOB = Label(name="collectorjob", help="Name of the job.")
GROUP = Label(name="group", help="Worker group, as the manifest names it.", at_most=MOST_GROUPS)
ENV = Label(name="env", help="Environment: EnvPool's task, gymnasium's id, or the entrypoint.")
PHASE = Label(
    name="phase",
    help="env: waiting for environments. inference: the policy decides. transfer: rows are written, and what else the "
    "loop does. weights: new ones are taken. store: batches go to the dataset. idle: no room in the queue, nothing to "
    "do. paused: told to stand still. build: environments and policy are made.",
    values=ACTIVITIES,
)
END = Label(name="end", help="How an episode ended.", values=("terminated", "truncated"))
DROPPED_FOR = Label(
    name="reason",
    help="crash: lost with a worker. stale: older than the staleness allowed. drop_oldest: the queue was full. drain: "
    "unfinished at the end. restore, seed: given up for them. stale_for_consumer: older than a consumer asked for.",
    values=DROP_REASONS,
)
RESTARTED_FOR = Label(
    name="reason",
    help="crash: the process ended. hang: it made no progress and was killed. error: it failed and said why.",
    values=("crash", "hang", "error"),
)
SIDE = Label(
    name="side",
    help="producer: workers, for room in the queue. consumer: whoever takes batches, for one to be there.",
    values=("producer", "consumer"),
)
PATH = Label(
    name="path",
    help="queue: rounds accepted. http: one batch a request. stream: many on one connection. memory: mapped by a "
    "consumer on the same machine.",
    values=("queue", "http", "stream", "memory"),
)
RESULT = Label(
    name="result",
    help="applied: every worker acts with it. partially_applied: some are late. failed: nobody acknowledged. "
    "superseded: a newer one came first. rejected: refused before any worker saw it. An update that is late counts "
    "under both its results.",
    values=UPDATE_RESULTS,
)
STAGE = Label(
    name="stage",
    help="receive: the body. verify: tensors. distribute: to the fleet. apply: until the last worker's word. total: "
    "all of them.",
    values=UPDATE_STAGES,
)
WORKER_STATE = Label(
    name="state",
    help="desired: places that are to be filled. ready: workers that may collect. starting: others.",
    values=("desired", "ready", "starting"),
)
HEAD_STATE = Label(name="state", help="What the head does; one is 1, the others 0.", values=HEAD_STATES)
HEARD = Label(
    name="state",
    help="answering. silent: no answer that can be read. refusing: it does not take the operator's token.",
    values=("answering", "silent", "refusing"),
)
METHOD = Label(name="method", help="HTTP method.", values=("GET", "HEAD", "PUT", "POST", "PATCH", "DELETE", "other"))
ROUTE = Label(name="route", help="Template of the path, or `unknown`; never the path itself.", at_most=40)
STATUS_CLASS = Label(name="status_class", help="First digit of the status.", values=("2xx", "3xx", "4xx", "5xx"))
GPU = Label(name="gpu", help="Index of the device.", at_most=16)
VERSION = Label(name="version", help="Of Cormorant.")
PYTHON = Label(name="python", help="Version of Python.")
TORCH = Label(name="torch", help="Version of PyTorch.")

JOB_NAMESPACE = Label(name="job_namespace", help="Namespace of the job.", at_most=1000)
JOB = Label(name="collectorjob", help="Name of the job.", at_most=1)
JOB_PHASE = Label(name="phase", help="`status.phase`: one is 1, the others are not exported.", at_most=1)
HANDLER = Label(
    name="handler",
    help="reconcile: a decision and what follows. poll: a question to a head. counters: a write of counters alone.",
    values=("reconcile", "poll", "counters"),
)  # fmt: skip
API_METHOD = Label(
    name="method", help="HTTP method of a request to the API server.", values=("GET", "POST", "PATCH", "PUT", "DELETE")
)
CODE = Label(name="code", help="Status that the API server answered; 0: it did not.", at_most=20)
QUEUE = Label(
    name="queue",
    help="jobs: to be reconciled. heads: to be asked. counters: to be written.",
    values=("jobs", "heads", "counters"),
)
