"""Metrics of a head, for the whole job. One scrape of the head shows everything."""

from cormorant_contract.metrics import labels as by
from cormorant_contract.metrics.labels import MetricList

_STEPS_S = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 10.0)
_BATCHES_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_UPDATES_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)
_RETURNS = (-1000.0, -100.0, -20.0, -10.0, -1.0, 0.0, 1.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 10000.0)
_LENGTHS = (10.0, 30.0, 100.0, 200.0, 500.0, 1000.0, 3000.0, 10000.0, 30000.0)
_VERSIONS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)

_METRICS = MetricList("cormorant_", by.COLLECTORJOB)
FRAMES = _METRICS.counter(
    "frames_total",
    "Frames accepted by the output after action repeat, as counted by totalFrames and including earlier heads. "
    "Constant while frames that were already counted are collected again.",
    by.ENV,
)
STEPPED_FRAMES = _METRICS.counter(
    "stepped_frames_total",
    "Frames stepped since this head started, including unfinished and lost batches; use it for rates by group.",
    by.GROUP,
    by.ENV,
)
FRAMES_PER_SECOND = _METRICS.gauge(
    "frames_per_second",
    "Frames stepped per second over the last 10 s; rate() of stepped_frames_total gives other windows.",
)
TARGET_FRAMES = _METRICS.gauge("target_frames", "totalFrames.", when="the manifest has totalFrames")
AGENT_STEPS = _METRICS.counter(
    "agent_steps_total", "Actions of agents in collected frames.", by.ENV, when="agents have acted in groups"
)
EPISODES = _METRICS.counter("episodes_total", "Episodes ended.", by.ENV, by.END)
EPISODE_RETURN = _METRICS.histogram("episode_return", "Undiscounted return of episodes.", by.ENV, buckets=_RETURNS)
EPISODE_LENGTH = _METRICS.histogram("episode_length_steps", "Length of episodes in frames.", by.ENV, buckets=_LENGTHS)
RECENT_RETURN = _METRICS.gauge(
    "recent_episode_return", "Mean return of the last 100 episodes.", by.ENV, when="an episode has ended"
)
RECENT_LENGTH = _METRICS.gauge(
    "recent_episode_length_steps", "Mean length of the last 100 episodes.", by.ENV, when="an episode has ended"
)
EPISODE_METRIC = _METRICS.gauge(
    "episode_metric",
    "Mean of an episode metric over the last 100 episodes.",
    by.METRIC,
    by.TASK,
    when="the manifest has episodeMetrics or variants, and an episode has ended",
)
_NORMALIZES = "the manifest has normalize"
NORMALIZE_FRAMES = _METRICS.gauge(
    "normalize_frames", "Acknowledged frames in the statistics of a key.", by.STATISTICS_KEY, when=_NORMALIZES
)
NORMALIZE_PUBLISHED = _METRICS.gauge(
    "normalize_published_frames",
    "Number of frames in the statistics of the newest published version.",
    by.STATISTICS_KEY,
    when=_NORMALIZES,
)
NORMALIZE_MEAN = _METRICS.gauge(
    "normalize_mean",
    "Running means of a key: the lowest and the highest.",
    by.STATISTICS_KEY,
    by.BOUND,
    when=_NORMALIZES,
)
NORMALIZE_STD = _METRICS.gauge(
    "normalize_std",
    "Running standard deviations of a key: the lowest and the highest.",
    by.STATISTICS_KEY,
    by.BOUND,
    when=_NORMALIZES,
)
ENV_STEP = _METRICS.histogram(
    "env_step_duration_seconds",
    "Wait for one vector step of the environments: one mean per batch, sampled every 16 steps.",
    by.GROUP,
    buckets=_STEPS_S,
)
INFERENCE = _METRICS.histogram(
    "inference_duration_seconds",
    "One policy inference for all environments of a group: one mean per batch, sampled every 16 steps.",
    by.GROUP,
    buckets=_STEPS_S,
)
_WITH_SERVERS = "the job has inference servers"
INFERENCE_ROWS = _METRICS.counter(
    "inference_rows_total", "Environments that servers acted for.", by.GROUP, when=_WITH_SERVERS
)
INFERENCE_PADDED_ROWS = _METRICS.counter(
    "inference_padded_rows_total", "Rows that only fill a batch up to its shape.", by.GROUP, when=_WITH_SERVERS
)
INFERENCE_ACTS = _METRICS.counter("inference_acts_total", "Acts of servers' policies.", by.GROUP, when=_WITH_SERVERS)
INFERENCE_REQUESTS = _METRICS.counter(
    "inference_requests_total", "Requests of workers, several rows each.", by.GROUP, when=_WITH_SERVERS
)
INFERENCE_WAIT = _METRICS.counter(
    "inference_wait_seconds_total", "Time that requests waited for their act.", by.GROUP, when=_WITH_SERVERS
)
INFERENCE_ACT = _METRICS.counter("inference_act_seconds_total", "Time of acts.", by.GROUP, when=_WITH_SERVERS)
BATCH = _METRICS.histogram(
    "batch_duration_seconds", "Time to collect one batch, without pauses.", by.GROUP, buckets=_BATCHES_S
)
PHASE_SECONDS = _METRICS.counter(
    "phase_seconds_total", "Time of workers by activity; the rates add up to the number of workers.", by.GROUP, by.PHASE
)
POLICY_VERSION = _METRICS.gauge(
    "policy_version",
    "Oldest policy version used by a worker of the group; the published one while no worker can collect.",
    by.GROUP,
)
POLICY_VERSION_PUBLISHED = _METRICS.gauge("policy_version_published", "Newest published version.")
STALENESS = _METRICS.histogram(
    "batch_staleness_versions",
    "Published version minus the oldest version in a batch when it is delivered; random frames count as 0.",
    buckets=_VERSIONS,
)
FRAMES_DROPPED = _METRICS.counter("frames_dropped_total", "Frames stepped but not delivered.", by.DROPPED_FOR)
BATCHES = _METRICS.counter("batches_total", "Batches accepted by the queue, and delivered by path.", by.PATH)
BATCH_BYTES = _METRICS.counter("batch_bytes_total", "Bytes of delivered batches.", by.PATH)
QUEUE_BATCHES = _METRICS.gauge("queue_batches", "Complete batches that no consumer has taken yet.")
QUEUE_CAPACITY = _METRICS.gauge("queue_capacity_batches", "output.queue.capacityBatches.", when="the job has a queue")
QUEUE_WAIT = _METRICS.counter(
    "queue_wait_seconds_total", "Time spent waiting for the queue, by side; shows the bottleneck.", by.SIDE
)
LENT_BATCHES = _METRICS.gauge("lent_batches", "Batches delivered to consumers but not acknowledged yet.")
REDELIVERED = _METRICS.counter(
    "batches_redelivered_total", "Batches delivered again because they were not acknowledged."
)
CONSUMERS = _METRICS.gauge("consumers", "Consumers that requested a batch in the last minute.")
UPDATES = _METRICS.counter("weight_updates_total", "Weight updates by result.", by.RESULT)
UPDATE_DURATION = _METRICS.histogram(
    "weight_update_duration_seconds", "Duration of weight updates by stage.", by.STAGE, buckets=_UPDATES_S
)
UPDATE_BYTES = _METRICS.counter("weight_update_bytes_total", "Bytes of accepted weight updates.")
UPDATE_IN_PROGRESS = _METRICS.gauge(
    "weight_update_in_progress", "1 while some worker has not applied the newest weight update."
)
LAST_APPLIED = _METRICS.gauge(
    "weight_last_applied_timestamp_seconds", "When the last weight update was applied.", when="one was applied"
)
PAUSED = _METRICS.gauge("paused", "1 while paused.")
PAUSE_SECONDS = _METRICS.counter("pause_seconds_total", "Time spent paused.")
WORKERS = _METRICS.gauge("workers", "Workers.", by.GROUP, by.WORKER_STATE)
WORKER_RESTARTS = _METRICS.counter("worker_restarts_total", "Workers replaced.", by.GROUP, by.RESTARTED_FOR)
ENV_RESTARTS = _METRICS.counter("env_restarts_total", "Subprocess environments restarted alone.", by.GROUP)
SINK_LAG = _METRICS.gauge(
    "sink_lag_frames", "Frames collected but not yet durable in the dataset.", when="the job has a dataset"
)
HEAD_STATE_METRIC = _METRICS.gauge("head_state", "State of the head.", by.HEAD_STATE)
HEAD_STARTED = _METRICS.gauge("head_start_timestamp_seconds", "When the head started.")
BUILD_INFO = _METRICS.gauge("build_info", "Constant 1 with version labels.", by.VERSION, by.PYTHON, by.TORCH)
HEAD_METRICS = tuple(_METRICS)
