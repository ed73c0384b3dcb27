"""One job: speed, time by phase, staleness, queue waits, failures."""

from charts.monitoring.dashboards.sheet import Panel, Section, choice, sheet
from grafana_foundation_sdk.builders.dashboard import Dashboard

_JOB = 'namespace=~"$namespace", collectorjob="$collectorjob"'
_GROUP = f'{_JOB}, group=~"$group"'


def build() -> Dashboard:
    return sheet(
        uid="cormorant-job",
        title="Cormorant / Job",
        description="One CollectorJob: frames, time, episodes, weights, queue, failures, devices.",
        variables=(
            choice("namespace", "Namespace", "label_values(cormorant_frames_total, namespace)"),
            choice(
                "collectorjob",
                "Job",
                'label_values(cormorant_frames_total{namespace=~"$namespace"}, collectorjob)',
                is_one=True,
            ),
            choice("group", "Group", f"label_values(cormorant_stepped_frames_total{{{_JOB}}}, group)"),
        ),
        sections=(_NOW, _FRAMES, _TIME, _SERVERS, _EPISODES, _NORMALIZATION, _WEIGHTS, _QUEUE, _TROUBLE, _REST),
    )


def _rate(metric: str, by: str, where: str = _JOB, *, of: str = "rate") -> str:
    return f"sum by ({by}) ({of}({metric}{{{where}}}[$__rate_interval]))"


def _quantile(q: str, metric: str, by: str = "le", where: str = _JOB) -> str:
    return f"histogram_quantile({q}, sum by ({by}) (rate({metric}_bucket{{{where}}}[$__rate_interval])))"


_NOW = Section(
    title="Now",
    panels=(
        Panel(
            title="State",
            description="State of the head.",
            unit="none",
            queries={"{{state}}": f"max by (state) (cormorant_head_state{{{_JOB}}}) == 1"},
            width=4,
            is_stat=True,
            shows_name=True,
        ),
        Panel(
            title="Frames",
            description="Frames accepted by the output, over all heads of the job, and the target.",
            unit="short",
            queries={
                "collected": f"max(cormorant_frames_total{{{_JOB}}})",
                "target": f"max(cormorant_target_frames{{{_JOB}}})",
            },
            width=4,
            is_stat=True,
        ),
        Panel(
            title="Frames per second",
            description="Current rate, as counted by the head.",
            unit="suffix: frames/s",
            queries={"now": f"sum(cormorant_frames_per_second{{{_JOB}}})"},
            width=4,
            is_stat=True,
        ),
        Panel(
            title="Workers",
            description="Ready and desired workers.",
            unit="none",
            queries={
                "ready": f'sum(cormorant_workers{{{_JOB}, state="ready"}})',
                "desired": f'sum(cormorant_workers{{{_JOB}, state="desired"}})',
            },
            width=4,
            is_stat=True,
        ),
        Panel(
            title="Newest policy version",
            description="Newest that was published.",
            unit="none",
            queries={"published": f"max(cormorant_policy_version_published{{{_JOB}}})"},
            width=4,
            is_stat=True,
        ),
        Panel(
            title="Age of the head",
            description="Time since this head started; a replacement starts over.",
            unit="dateTimeFromNow",
            queries={"began": f"max(cormorant_head_start_timestamp_seconds{{{_JOB}}}) * 1000"},
            width=4,
            is_stat=True,
        ),
    ),
)
_FRAMES = Section(
    title="Frames per second",
    panels=(
        Panel(
            title="Frames per second: accepted and stepped",
            description="Accepted: counted towards totalFrames. Stepped: includes unfinished batches and lost frames.",
            unit="suffix: frames/s",
            queries={
                "accepted": f"sum(rate(cormorant_frames_total{{{_JOB}}}[$__rate_interval]))",
                "stepped": f"sum(rate(cormorant_stepped_frames_total{{{_JOB}}}[$__rate_interval]))",
            },
        ),
        Panel(
            title="Frames per second by group",
            description="Frames stepped per second by the workers of each group.",
            unit="suffix: frames/s",
            queries={"{{group}}": _rate("cormorant_stepped_frames_total", "group", _GROUP)},
            is_stacked=True,
        ),
        Panel(
            title="Frames per second by environment",
            description="Frames stepped per second in each environment.",
            unit="suffix: frames/s",
            queries={"{{env}}": _rate("cormorant_stepped_frames_total", "env")},
            is_stacked=True,
        ),
    ),
)
_TIME = Section(
    title="Where the time goes",
    panels=(
        Panel(
            title="Workers' time by phase",
            description="env: waiting for environments. inference: the policy. transfer: writing rows. idle: the queue "
            "is full or there is no work. In worker-seconds per second; adds up to the worker count.",
            unit="suffix: workers",
            queries={"{{phase}}": _rate("cormorant_phase_seconds_total", "phase", _GROUP)},
            width=12,
            is_stacked=True,
        ),
        Panel(
            title="Duration of one vector step",
            description="Mean time in the environments and in the policy for one step of all environments of a worker.",
            unit="s",
            queries={
                "env, {{group}}": f"sum by (group) (rate(cormorant_env_step_duration_seconds_sum{{{_GROUP}}}"
                "[$__rate_interval])) / sum by (group) (rate(cormorant_env_step_duration_seconds_count"
                f"{{{_GROUP}}}[$__rate_interval]))",
                "inference, {{group}}": f"sum by (group) (rate(cormorant_inference_duration_seconds_sum{{{_GROUP}}}"
                "[$__rate_interval])) / sum by (group) (rate(cormorant_inference_duration_seconds_count"
                f"{{{_GROUP}}}[$__rate_interval]))",
            },
            width=6,
        ),
        Panel(
            title="Duration of one batch",
            description="Time in which a worker collects one batch: median and 99th percentile.",
            unit="s",
            queries={
                "p50, {{group}}": _quantile("0.5", "cormorant_batch_duration_seconds", "le, group", _GROUP),
                "p99, {{group}}": _quantile("0.99", "cormorant_batch_duration_seconds", "le, group", _GROUP),
            },
            width=6,
        ),
    ),
)
_SERVERS = Section(
    title="Inference servers",
    applies_to="a worker group of role inference",
    panels=(
        Panel(
            title="Environments acted for per second",
            description="Rows of all workers, and rows that only fill batches up to their shape.",
            unit="suffix: rows/s",
            queries={
                "{{group}}": _rate("cormorant_inference_rows_total", "group", _GROUP),
                "{{group}}: padding": _rate("cormorant_inference_padded_rows_total", "group", _GROUP),
            },
            width=8,
        ),
        Panel(
            title="Environments per call of the policy",
            description="Batch fill: rows per act of the policy.",
            unit="none",
            queries={
                "{{group}}": f"{_rate('cormorant_inference_rows_total', 'group', _GROUP)} / "
                f"{_rate('cormorant_inference_acts_total', 'group', _GROUP)}"
            },
            width=8,
        ),
        Panel(
            title="Wait and act",
            description="Mean time that a request waits, and mean time of a call of the policy.",
            unit="s",
            queries={
                "{{group}}: wait": f"{_rate('cormorant_inference_wait_seconds_total', 'group', _GROUP)} / "
                f"{_rate('cormorant_inference_requests_total', 'group', _GROUP)}",
                "{{group}}: act": f"{_rate('cormorant_inference_act_seconds_total', 'group', _GROUP)} / "
                f"{_rate('cormorant_inference_acts_total', 'group', _GROUP)}",
            },
            width=8,
        ),
    ),
)

_EPISODES = Section(
    title="Episodes",
    panels=(
        Panel(
            title="Episode return",
            description="Mean of the last 100 episodes, and quantiles of the episodes that ended in the interval.",
            unit="none",
            queries={
                "mean": f"avg(cormorant_recent_episode_return{{{_JOB}}})",
                "p10": _quantile("0.1", "cormorant_episode_return"),
                "p90": _quantile("0.9", "cormorant_episode_return"),
            },
        ),
        Panel(
            title="Episode length",
            description="In frames: mean of the last 100 episodes, and of the episodes that ended in the interval.",
            unit="none",
            queries={
                "last 100": f"avg(cormorant_recent_episode_length_steps{{{_JOB}}})",
                "interval": f"sum(rate(cormorant_episode_length_steps_sum{{{_JOB}}}[$__rate_interval]))"
                f" / sum(rate(cormorant_episode_length_steps_count{{{_JOB}}}[$__rate_interval]))",
            },
        ),
        Panel(
            title="Episode metrics",
            description="collection.episodeMetrics: mean of the last 100 episodes.",
            unit="none",
            queries={"{{name}} {{task}}": f"avg by (name, task) (cormorant_episode_metric{{{_JOB}}})"},
        ),
        Panel(
            title="Episodes per second",
            description="Terminated by the environment, or truncated.",
            unit="suffix: episodes/s",
            queries={"{{end}}": _rate("cormorant_episodes_total", "end")},
            is_stacked=True,
        ),
    ),
)
_NORMALIZATION = Section(
    title="Normalization",
    applies_to="collection.normalize",
    panels=(
        Panel(
            title="Frames in the statistics",
            description="Acknowledged frames, and those that the newest published policy acts with. The gap grows "
            "while the learner publishes nothing.",
            unit="short",
            queries={
                "{{key}}": f"max by (key) (cormorant_normalize_frames{{{_JOB}}})",
                "{{key}}: published": f"max by (key) (cormorant_normalize_published_frames{{{_JOB}}})",
            },
            width=8,
        ),
        Panel(
            title="Standard deviations",
            description="Lowest and highest of each key; next/reward is the discounted return. A lowest near 0: a "
            "constant value, whose noise fills the whole clipped range.",
            unit="none",
            queries={"{{key}} {{bound}}": f"max by (key, bound) (cormorant_normalize_std{{{_JOB}}})"},
            width=8,
        ),
        Panel(
            title="Means",
            description="Lowest and highest of each key. They settle unless the policy visits other states.",
            unit="none",
            queries={"{{key}} {{bound}}": f"max by (key, bound) (cormorant_normalize_mean{{{_JOB}}})"},
            width=8,
        ),
    ),
)
_WEIGHTS = Section(
    title="Weights",
    panels=(
        Panel(
            title="Policy lag",
            description="Published version minus the oldest version in use, by group.",
            unit="none",
            queries={
                "{{group}}": f"max(cormorant_policy_version_published{{{_JOB}}}) - on () group_right ()"
                f" min by (group) (cormorant_policy_version{{{_GROUP}}})"
            },
        ),
        Panel(
            title="Staleness of batches",
            description="Versions between the oldest policy in a batch and the published one, on delivery.",
            unit="none",
            queries={
                "p50": _quantile("0.5", "cormorant_batch_staleness_versions"),
                "p95": _quantile("0.95", "cormorant_batch_staleness_versions"),
            },
        ),
        Panel(
            title="Update latency by stage",
            description="Mean duration of each stage of a publish, up to the last worker's acknowledgement.",
            unit="s",
            queries={
                "{{stage}}": f"sum by (stage) (rate(cormorant_weight_update_duration_seconds_sum{{{_JOB}, "
                'stage!="total"}[$__rate_interval])) / sum by (stage) (rate('
                f'cormorant_weight_update_duration_seconds_count{{{_JOB}, stage!="total"}}[$__rate_interval]))'
            },
            is_stacked=True,
        ),
        Panel(
            title="Update latency",
            description="Whole publishes: median and 99th percentile.",
            unit="s",
            queries={
                "p50": _quantile("0.5", "cormorant_weight_update_duration_seconds", "le", f'{_JOB}, stage="total"'),
                "p99": _quantile("0.99", "cormorant_weight_update_duration_seconds", "le", f'{_JOB}, stage="total"'),
            },
        ),
        Panel(
            title="Updates by result",
            description="Publishes per second by result; superseded: a newer one came first.",
            unit="suffix: updates/s",
            queries={"{{result}}": _rate("cormorant_weight_updates_total", "result")},
            is_stacked=True,
        ),
        Panel(
            title="Weights published, bytes per second",
            description="Bytes of weights published per second.",
            unit="Bps",
            queries={"bytes/s": f"sum(rate(cormorant_weight_update_bytes_total{{{_JOB}}}[$__rate_interval]))"},
        ),
    ),
)
_QUEUE = Section(
    title="Queue",
    panels=(
        Panel(
            title="Batches waiting and lent",
            description="waiting: complete, not taken. lent: taken, not acknowledged. capacity: size of the queue.",
            unit="none",
            queries={
                "waiting": f"sum(cormorant_queue_batches{{{_JOB}}})",
                "lent": f"sum(cormorant_lent_batches{{{_JOB}}})",
                "capacity": f"max(cormorant_queue_capacity_batches{{{_JOB}}})",
            },
        ),
        Panel(
            title="Share of time waiting for the queue",
            description="producer: workers wait for room; the learner is the bottleneck. consumer: the learner waits "
            "for batches; the workers are the bottleneck.",
            unit="percentunit",
            queries={"{{side}}": _rate("cormorant_queue_wait_seconds_total", "side")},
            most=1.0,
        ),
        Panel(
            title="Batches per second",
            description="Batches accepted by the queue, and delivered: HTTP, stream, shared memory.",
            unit="suffix: batches/s",
            queries={"{{path}}": _rate("cormorant_batches_total", "path")},
        ),
        Panel(
            title="Batches delivered, bytes per second",
            description="Bytes of batches per second, by path.",
            unit="Bps",
            queries={"{{path}}": _rate("cormorant_batch_bytes_total", "path")},
        ),
        Panel(
            title="Consumers",
            description="Consumers that asked for batches in the last minute.",
            unit="none",
            queries={"consumers": f"sum(cormorant_consumers{{{_JOB}}})"},
        ),
        Panel(
            title="Batches redelivered",
            description="Batches per second that were not acknowledged in time.",
            unit="suffix: batches/s",
            queries={"again": f"sum(rate(cormorant_batches_redelivered_total{{{_JOB}}}[$__rate_interval]))"},
        ),
    ),
)
_TROUBLE = Section(
    title="Problems",
    panels=(
        Panel(
            title="Workers replaced",
            description="Workers replaced in the interval, by reason. hang: killed for lack of progress.",
            unit="none",
            queries={
                "{{group}}, {{reason}}": "sum by (group, reason) "
                f"(increase(cormorant_worker_restarts_total{{{_GROUP}}}[$__rate_interval]))"
            },
        ),
        Panel(
            title="Environments restarted",
            description="Subprocess environments that crashed or hung in the interval; their workers keep running.",
            unit="none",
            queries={"{{group}}": _rate("cormorant_env_restarts_total", "group", _GROUP, of="increase")},
        ),
        Panel(
            title="Frames dropped",
            description="Frames per second that were stepped but not delivered, by reason.",
            unit="suffix: frames/s",
            queries={"{{reason}}": _rate("cormorant_frames_dropped_total", "reason")},
        ),
        Panel(
            title="Workers by state",
            description="Ready, starting and desired workers.",
            unit="none",
            queries={"{{group}}, {{state}}": f"sum by (group, state) (cormorant_workers{{{_GROUP}}})"},
        ),
        Panel(
            title="Paused",
            description="Share of the time that the fleet was paused.",
            unit="percentunit",
            queries={"paused": f"max(rate(cormorant_pause_seconds_total{{{_JOB}}}[$__rate_interval]))"},
            most=1.0,
        ),
        Panel(
            title="Dataset lag",
            description="Frames in batches that are not durable yet; 0 without a dataset.",
            unit="none",
            queries={"frames": f"sum(cormorant_sink_lag_frames{{{_JOB}}}) or vector(0)"},
        ),
    ),
)
_REST = Section(
    title="Devices",
    panels=(
        Panel(
            title="GPU utilization",
            description="Share of time in which a kernel ran, by pod and device; NVIDIA devices only.",
            unit="percentunit",
            queries={"{{pod}} gpu {{gpu}}": f"max by (pod, gpu) (cormorant_worker_gpu_utilization_ratio{{{_GROUP}}})"},
            most=1.0,
        ),
        Panel(
            title="GPU memory",
            description="Memory in use, by pod and device; NVIDIA devices only.",
            unit="bytes",
            queries={"{{pod}} gpu {{gpu}}": f"max by (pod, gpu) (cormorant_worker_gpu_memory_used_bytes{{{_GROUP}}})"},
        ),
    ),
)
