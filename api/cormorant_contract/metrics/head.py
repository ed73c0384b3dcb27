"""What a head exports, for the whole job. One scrape of it shows everything."""

from cormorant_contract.metrics.labels import (
    BOUND,
    COLLECTORJOB,
    DROPPED_FOR,
    END,
    ENV,
    GPU,
    GROUP,
    HEAD_STATE,
    METHOD,
    METRIC,
    PATH,
    PHASE,
    PYTHON,
    RESTARTED_FOR,
    RESULT,
    ROUTE,
    SIDE,
    STAGE,
    STATISTICS_KEY,
    STATUS_CLASS,
    TASK,
    TORCH,
    VERSION,
    WORKER_STATE,
)
from cormorant_contract.metrics.metric import Kind, Label, Metric

_STEPS_S = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 10.0)
_BATCHES_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_UPDATES_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)
_REQUESTS_S = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0)
_RETURNS = (-1000.0, -100.0, -20.0, -10.0, -1.0, 0.0, 1.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 10000.0)
_LENGTHS = (10.0, 30.0, 100.0, 200.0, 500.0, 1000.0, 3000.0, 10000.0, 30000.0)
_VERSIONS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)


def _of_job(
    name: str,
    kind: Kind,
    help_: str,
    *labels: Label,
    buckets: tuple[float, ...] = (),
    when: str = "",
) -> Metric:
    return Metric(
        name=f"cormorant_{name}",
        kind=kind,
        help=help_,
        labels=(COLLECTORJOB, *labels),
        buckets=buckets,
        when=when,
    )


FRAMES = _of_job(
    "frames_total",
    "counter",
    "Frames accepted by the output after action repeat, as counted by totalFrames and including earlier heads. "
    "Constant while frames that were already counted are collected again.",
    ENV,
)
STEPPED_FRAMES = _of_job(
    "stepped_frames_total",
    "counter",
    "Frames stepped since this head started, including unfinished and lost batches; use it for rates by group.",
    GROUP,
    ENV,
)
FRAMES_PER_SECOND = _of_job("frames_per_second", "gauge", "Frames stepped per second over the last 10 s; rate() of "
                            "stepped_frames_total gives other windows.")  # fmt: skip
TARGET_FRAMES = _of_job("target_frames", "gauge", "totalFrames.", when="the manifest has totalFrames")
EPISODES = _of_job("episodes_total", "counter", "Episodes ended.", ENV, END)
EPISODE_RETURN = _of_job("episode_return", "histogram", "Undiscounted return of episodes.", ENV, buckets=_RETURNS)
EPISODE_LENGTH = _of_job("episode_length_steps", "histogram", "Length of episodes in frames.", ENV, buckets=_LENGTHS)
RECENT_RETURN = _of_job(
    "recent_episode_return", "gauge", "Mean return of the last 100 episodes.", ENV, when="an episode has ended"
)
RECENT_LENGTH = _of_job(
    "recent_episode_length_steps", "gauge", "Mean length of the last 100 episodes.", ENV, when="an episode has ended"
)
EPISODE_METRIC = _of_job(
    "episode_metric", "gauge", "Mean of an episode metric over the last 100 episodes.", METRIC, TASK,
    when="the manifest has episodeMetrics or variants, and an episode has ended",
)  # fmt: skip
_NORMALIZES = "the manifest has normalize"
NORMALIZE_FRAMES = _of_job(
    "normalize_frames", "gauge", "Acknowledged frames in the statistics of a key.", STATISTICS_KEY, when=_NORMALIZES
)
NORMALIZE_PUBLISHED = _of_job(
    "normalize_published_frames", "gauge", "Frames in the statistics that the newest published version acts with.",
    STATISTICS_KEY, when=_NORMALIZES,
)  # fmt: skip
NORMALIZE_MEAN = _of_job(
    "normalize_mean", "gauge", "Running means of a key: the lowest and the highest.", STATISTICS_KEY, BOUND,
    when=_NORMALIZES,
)  # fmt: skip
NORMALIZE_STD = _of_job(
    "normalize_std", "gauge", "Running standard deviations of a key: the lowest and the highest.", STATISTICS_KEY,
    BOUND, when=_NORMALIZES,
)  # fmt: skip
ENV_STEP = _of_job(
    "env_step_duration_seconds",
    "histogram",
    "Wait for one vector step of the environments: one mean per batch, sampled every 16 steps.",
    GROUP,
    buckets=_STEPS_S,
)
INFERENCE = _of_job(
    "inference_duration_seconds",
    "histogram",
    "One policy inference for all environments of a group: one mean per batch, sampled every 16 steps.",
    GROUP,
    buckets=_STEPS_S,
)
_WITH_SERVERS = "the job has inference servers"
INFERENCE_ROWS = _of_job(
    "inference_rows_total", "counter", "Environments that servers acted for.", GROUP, when=_WITH_SERVERS
)
INFERENCE_PADDED_ROWS = _of_job(
    "inference_padded_rows_total", "counter", "Rows that only fill a batch up to its shape.", GROUP, when=_WITH_SERVERS
)
INFERENCE_ACTS = _of_job("inference_acts_total", "counter", "Acts of servers' policies.", GROUP, when=_WITH_SERVERS)
INFERENCE_REQUESTS = _of_job(
    "inference_requests_total", "counter", "Requests of workers, several rows each.", GROUP, when=_WITH_SERVERS
)
INFERENCE_WAIT = _of_job(
    "inference_wait_seconds_total", "counter", "Time that requests waited for their act.", GROUP, when=_WITH_SERVERS
)
INFERENCE_ACT = _of_job("inference_act_seconds_total", "counter", "Time of acts.", GROUP, when=_WITH_SERVERS)
BATCH = _of_job(
    "batch_duration_seconds", "histogram", "Time to collect one batch, without pauses.", GROUP, buckets=_BATCHES_S
)
PHASE_SECONDS = _of_job(
    "phase_seconds_total", "counter", "Time of workers by activity; the rates add up to the number of workers.",
    GROUP, PHASE,
)  # fmt: skip
POLICY_VERSION = _of_job("policy_version", "gauge", "Oldest policy version used by a worker of the group.", GROUP)
POLICY_VERSION_PUBLISHED = _of_job("policy_version_published", "gauge", "Newest published version.")
STALENESS = _of_job(
    "batch_staleness_versions",
    "histogram",
    "Published version minus the oldest version in a batch when it is delivered; random frames count as 0.",
    buckets=_VERSIONS,
)
FRAMES_DROPPED = _of_job("frames_dropped_total", "counter", "Frames stepped but not delivered.", DROPPED_FOR)
BATCHES = _of_job("batches_total", "counter", "Batches accepted by the queue, and delivered by path.", PATH)
BATCH_BYTES = _of_job("batch_bytes_total", "counter", "Bytes of delivered batches.", PATH)
QUEUE_BATCHES = _of_job("queue_batches", "gauge", "Complete batches that no consumer has taken yet.")
QUEUE_CAPACITY = _of_job("queue_capacity_batches", "gauge", "output.queue.capacityBatches.", when="the job has a queue")
QUEUE_WAIT = _of_job(
    "queue_wait_seconds_total", "counter", "Time spent waiting for the queue, by side; shows the bottleneck.", SIDE
)
LENT_BATCHES = _of_job("lent_batches", "gauge", "Batches delivered to consumers but not acknowledged yet.")
REDELIVERED = _of_job("batches_redelivered_total", "counter", "Batches delivered again because they were "
                      "not acknowledged.")  # fmt: skip
CONSUMERS = _of_job("consumers", "gauge", "Consumers that requested a batch in the last minute.")
CONSUMER_SEEN = _of_job(
    "consumer_last_seen_timestamp_seconds",
    "gauge",
    "When a consumer last requested a batch.",
    when="one has requested a batch",
)
UPDATES = _of_job("weight_updates_total", "counter", "Weight updates by result.", RESULT)
UPDATE_DURATION = _of_job(
    "weight_update_duration_seconds", "histogram", "Duration of weight updates by stage.", STAGE, buckets=_UPDATES_S
)
UPDATE_BYTES = _of_job("weight_update_bytes_total", "counter", "Bytes of accepted weight updates.")
UPDATE_IN_PROGRESS = _of_job(
    "weight_update_in_progress", "gauge", "1 while some worker has not applied the newest weight update."
)
LAST_APPLIED = _of_job(
    "weight_last_applied_timestamp_seconds", "gauge", "When the last weight update was applied.", when="one was applied"
)
PAUSED = _of_job("paused", "gauge", "1 while paused.")
PAUSE_LEASES = _of_job("pause_leases", "gauge", "Pause leases in effect.")
PAUSE_SECONDS = _of_job("pause_seconds_total", "counter", "Time spent paused.")
WORKERS = _of_job("workers", "gauge", "Workers.", GROUP, WORKER_STATE)
WORKER_RESTARTS = _of_job("worker_restarts_total", "counter", "Workers replaced.", GROUP, RESTARTED_FOR)
ENV_RESTARTS = _of_job("env_restarts_total", "counter", "Subprocess environments restarted alone.", GROUP)
SINK_LAG = _of_job(
    "sink_lag_frames", "gauge", "Frames collected but not yet durable in the dataset.", when="the job has a dataset"
)
HEAD_STATE_METRIC = _of_job("head_state", "gauge", "State of the head.", HEAD_STATE)
HEAD_STARTED = _of_job("head_start_timestamp_seconds", "gauge", "When the head started.")
HTTP_REQUESTS = _of_job(
    "http_requests_total", "counter", "HTTP requests answered, without probes and scrapes.",
    METHOD, ROUTE, STATUS_CLASS,
)  # fmt: skip
HTTP_DURATION = _of_job(
    "http_request_duration_seconds",
    "histogram",
    "Time from the request's header to the end of the response, including requested long-poll waits.",
    ROUTE,
    buckets=_REQUESTS_S,
)
BUILD_INFO = _of_job("build_info", "gauge", "Constant 1 with version labels.", VERSION, PYTHON, TORCH)
GPU_UTILIZATION = _of_job(
    "gpu_utilization_ratio", "gauge", "Fraction of time in which a kernel was running.", GPU,
    when="workers are processes of the head's machine, which has NVIDIA devices",
)  # fmt: skip
GPU_MEMORY = _of_job(
    "gpu_memory_used_bytes", "gauge", "Device memory in use by all processes.", GPU,
    when="workers are processes of the head's machine, which has NVIDIA devices",
)  # fmt: skip

FLEET_METRICS = (
    FRAMES, STEPPED_FRAMES, TARGET_FRAMES, EPISODES, EPISODE_RETURN, EPISODE_LENGTH, RECENT_RETURN,
    RECENT_LENGTH, EPISODE_METRIC, ENV_STEP, INFERENCE, NORMALIZE_FRAMES, NORMALIZE_PUBLISHED, NORMALIZE_MEAN,
    NORMALIZE_STD,
    BATCH, PHASE_SECONDS, POLICY_VERSION, POLICY_VERSION_PUBLISHED, STALENESS, FRAMES_DROPPED, QUEUE_BATCHES,
    QUEUE_CAPACITY, QUEUE_WAIT, WORKERS, WORKER_RESTARTS, ENV_RESTARTS, SINK_LAG, BUILD_INFO, GPU_UTILIZATION,
    GPU_MEMORY, PAUSED, PAUSE_SECONDS, INFERENCE_ROWS, INFERENCE_PADDED_ROWS, INFERENCE_ACTS, INFERENCE_REQUESTS,
    INFERENCE_WAIT, INFERENCE_ACT,
)  # fmt: skip
"""Counters of a fleet; `cormorant run --metrics-port` exports these alone."""
HEAD_METRICS = (
    *FLEET_METRICS, FRAMES_PER_SECOND, BATCHES, BATCH_BYTES, LENT_BATCHES, REDELIVERED, CONSUMERS, CONSUMER_SEEN,
    UPDATES, UPDATE_DURATION, UPDATE_BYTES, UPDATE_IN_PROGRESS, LAST_APPLIED, PAUSE_LEASES, HEAD_STATE_METRIC,
    HEAD_STARTED, HTTP_REQUESTS, HTTP_DURATION,
)  # fmt: skip
