"""Manifests and the verdict on each: one table for pydantic, for the CRD offline, and for a real API server."""

from manifest_making import ABSENT, Case, Document, groups, gymnasium, manifest, rule, schema, strict

CPU, GPU = {"name": "cpu"}, {"name": "gpu", "device": "gpu", "replicas": 1}
SERVERS = {**GPU, "role": "inference"}
_B = {"entrypoint": "a:b"}
MLP = {"entrypoint": "cormorant.policies:mlp"}

_WON, _SUCCESS = {"key": "won"}, {"name": "success", "key": "won"}
_MLP = {"policy": {"entrypoint": "cormorant.policies:mlp"}}
_SWEEP = {"count": 3, "checkpoints": ["a", "b"]}
_IN_PLACE = "checkpoints are weights for policy.entrypoint in place of policy.initialWeights"
_ONE_LIST = "exactly one of count, seeds and resetOptions is required"
_RESULTS = {"dataset": {"uri": "s3://b/results"}}


def _vector(**fields: object) -> Document:
    return manifest(env={"vector": {"numEnvs": 8} | fields})


def _openenv(**fields: object) -> Document:
    return manifest(env={"openenv": {"numEnvs": 8} | fields})


def _agents(**fields: object) -> Document:
    return manifest(env={"pettingzoo": {"numEnvs": 8} | fields})


def _policies(**agents: object) -> Document:
    return _agents(id="a") | {"spec": _agents(id="a")["spec"] | {"policy": {"agents": agents}}}


def _filled(dtype: str, fill: float) -> Document:
    return {**_WON, "dtype": dtype, "fill": fill}


VALID: dict[str, Document] = {
    "smallest": manifest(),
    "lockstep": manifest(env__envpool__batchSize=8),
    "half-batches": manifest(env__envpool__batchSize=4),
    "whole-float": manifest(collection__framesPerBatch=64.0),
    "null-block-is-absent": manifest(env__gymnasium=None, output={"queue": {}, "dataset": None}),
    "null-with-default": manifest(collection__seed=None),
    "null-inside-kwargs": manifest(env__envpool__kwargs={"noop_max": None, "deep": {"x": [None, 1.5]}}),
    "largest-count": manifest(collection__totalFrames=2**53 - 1),
    "one-frame": manifest(collection__totalFrames=1),
    "strictly-on-policy": manifest(collection__weights={"maxStaleness": 0}),
    "preemptive": manifest(collection__mode="sync", collection__preemptiveThreshold=0.75),
    "preempt-nobody-async": manifest(collection__preemptiveThreshold=1),
    "players": manifest(env__envpool__groups="perAgent"),
    "dataset-only": manifest(output={"dataset": {"uri": "file:///data/pong"}}),
    "queue-and-dataset": manifest(output={"queue": {"onFull": "drop_oldest"}, "dataset": {"uri": "s3://b/pong"}}),
    "entrypoint": manifest(policy={"entrypoint": "my_pkg.policies:Actor.make", "kwargs": {"hidden": [64, 64]}}),
    "variants": manifest(env__variants=[{"name": "easy"}, {"name": "hard", "weight": 3, "kwargs": {"a": None}}]),
    "variants-of-tasks": manifest(env__variants=[{"name": "Pong", "taskId": "Pong-v5"}, {"name": "b.0"}]),
    "registered": gymnasium(),
    "namespaced-id": gymnasium(id="ALE/Pong-v5"),
    "factory": gymnasium(id=None, entrypoint="my_pkg.envs:make"),
    "wrapped": gymnasium(
        wrappers=[{"entrypoint": "gymnasium.wrappers:ResizeObservation", "kwargs": {"shape": [84, 84]}}]
    ),
    "vector": _vector(id="ale_py:ALE/Pong-v5", kwargs={"repeat_action_probability": 0.25}),
    "vector-factory": _vector(entrypoint="my_pkg.envs:make_vector"),
    "openenv": _openenv(url="http://127.0.0.1:8000", fields={"action": [{"name": "move", "values": ["UP", "DOWN"]}]}),
    "openenv-image": _openenv(image="grid-world:1", fields={"observation": [{"name": "board", "shape": [6, 7]}]}),
    "agents": _agents(id="mpe2/simple_spread_v3", kwargs={"N": 3}, groups="all", episodeEnds="any", teamReward="mean"),
    "agents-policies": _policies(
        red={"entrypoint": "a:b", "kwargs": {"hidden": [8]}},
        blue={"model": "red", "sample": {"window": 20, "latestRatio": 1}},
        old={"model": "red", "version": 0},
        dice={"random": {}},
    ),
    "agents-mapped": _agents(entrypoint="my_pkg.envs:make", groupMap={"red": ["a", "b"], "blue": ["c"]}),
    "timeouts": gymnasium(stepTimeoutSeconds=5, resetTimeoutSeconds=5, maxRestarts=0, vectorization="inline"),
    "episodes-counted": manifest(collection__episodes={"count": 100, "deterministic": False}, output=_RESULTS),
    "episodes-by-seed": manifest(collection__episodes={"seeds": [3, 0, 2**31 - 1]}, output=_RESULTS),
    "episodes-by-options": manifest(
        env={"gymnasium": {"id": "CartPole-v1", "numEnvs": 8}},
        collection__episodes={"resetOptions": [{"low": -0.1, "high": 0.1}, {}]},
        output=_RESULTS,
    ),
    "episodes-of-pairings": manifest(
        env__envpool__groups="perAgent",
        policy={"agents": {"player_0": _B, "player_1": {"model": "player_0"}}},
        collection__episodes=_SWEEP,
        output=_RESULTS,
    ),
    "episodes-of-checkpoints": manifest(**_MLP, collection__episodes=_SWEEP, output=_RESULTS),
    "episodes-dealt": manifest(
        env__variants=[{"name": "easy"}, {"name": "hard", "weight": 2}],
        collection__episodes={"seeds": [1, 2, 3], "perTask": False},
        output=_RESULTS,
    ),
    "last-seeds": manifest(collection__seed=2**31 - 10, collection__episodes={"count": 10}, output=_RESULTS),
    "info": manifest(
        env__info=[
            {"key": "lives"},
            {"key": "TimeLimit.truncated", "dtype": "bool", "shape": [], "fill": 1},
            {"key": "ram", "dtype": "uint8", "shape": [128], "fill": 255},
            {"key": "x", "dtype": "float64", "fill": 0.5},
            {"key": "steps", "dtype": "int64", "fill": -(2**53 - 1)},
        ]
    ),
    "episode-metrics": manifest(
        env__info=[{"key": "won"}],
        collection__episodeMetrics=[_SUCCESS, {"name": "ever", "key": "won", "reduce": "any"}],
    ),
    "code": manifest(code={"configMap": "my-policies"}),
    "two-groups": groups(CPU, GPU),
    "second-is-elastic": groups({"name": "a", "replicas": 0}, {"name": "b", "maxReplicas": 4}, elasticGroup="b"),
    "inference": groups(CPU, SERVERS, policy=MLP, inference={"maxBatch": 64}),
    "inference-of-two-groups": groups(
        SERVERS, {"name": "a", "role": "collect"}, {**SERVERS, "name": "c"}, policy=MLP, elasticGroup="a"
    ),
    "autoscale": groups({"name": "cpu", "autoscale": {"maxReplicas": 4}}, replicas=4),
    "replicas-at-bounds": groups({"name": "cpu", "minReplicas": 4, "maxReplicas": 4}, replicas=4),
    "scaled-to-zero": manifest(replicas=0),
    "template": groups(
        {"name": "cpu", "template": {"spec": {"nodeSelector": {"zone": "a"}}}, "resources": {"limits": {"cpu": "4"}}}
    ),
    "bfloat16": manifest(collection__bfloat16=["logits", "extra.value"]),
    "resets-in-lockstep": manifest(env__envpool__batchSize=8, collection__resetAtEachBatch=True),
    "compiled": manifest(policy={"entrypoint": "a:b", "compile": "on", "dtype": "bfloat16"}),
    "run-policy": manifest(runPolicy={"onStall": "Fail", "onUnschedulable": "ScaleToFit", "cleanPodPolicy": "None"}),
    "longest-name": manifest("a" * 40),
    "tls-of-a-secret": manifest(head={"tls": {"secretName": "pong-certificate"}}),
    "tls-of-an-issuer": manifest(
        head={
            "tls": {"certManager": {"issuerRef": {"name": "ca", "kind": "ClusterIssuer", "group": "cert-manager.io"}}}
        }
    ),
}

INVALID: dict[str, Case] = {
    **{
        name: Case(
            f"spec.{'collection.episodeMetrics' if metrics else 'env.info'}{field}",
            sentence,
            manifest(env__info=info, **({"collection__episodeMetrics": metrics} if metrics else {})),
            by=by,
        )
        for name, info, metrics, field, sentence, by in (
            ("info-twice", [_WON, _WON], [], "", "the key won occurs twice in info", "schema"),
            ("info-key", [{"key": "a/b"}], [], "[0].key", '"a/b" is not valid; write letters, digits', "schema"),
            ("info-of-words", [{**_WON, "dtype": "str"}], [], "[0].dtype", '"str" is not one of bool', "schema"),
            ("fill-flag", [_filled("bool", 2)], [], "[0].fill", "2 of won does not fit bool", "rule"),
            ("fill-int", [_filled("int64", 0.5)], [], "[0].fill", "0.5 of won does not fit int64", "rule"),
            ("fill-low", [_filled("uint8", -1)], [], "[0].fill", "-1 of won does not fit uint8", "rule"),
            ("metric-twice", [_WON], [_SUCCESS] * 2, "", "the name success occurs twice", "schema"),
            ("metric-undeclared", [{"key": "x"}], [_SUCCESS], "", 'to env.info, which has ["x"]', "rule"),
            ("metric-without-info", None, [_SUCCESS], "", "reads a key that env.info does not declare", "rule"),
            ("metric-shape", [{**_WON, "shape": [2]}], [_SUCCESS], "", "success reads a key with a shape", "rule"),
            ("metric-name", [_WON], [{**_SUCCESS, "name": "return"}], "[0].name", "the name return is taken", "rule"),
            ("metric-reduce", [_WON], [{**_SUCCESS, "reduce": "p50"}], "[0].reduce", '"p50" is not one of', "schema"),
        )
    },
    **{
        name: Case(
            f"spec.collection.episodes{field}",
            sentence,
            manifest(collection__episodes=episodes, output=_RESULTS, **more),
            by="schema" if field else "rule",
        )
        for name, episodes, more, field, sentence in (
            ("episodes-without-list", {}, {}, "", f"{_ONE_LIST}, found 0"),
            ("episodes-of-two-lists", {"count": 3, "seeds": [1]}, {}, "", f"{_ONE_LIST}, found 2"),
            ("episode-twice", {"seeds": [1, 2, 2]}, {}, ".seeds", "seed 2 is listed more than once"),
            (
                "options-of-envpool",
                {"resetOptions": [{"level": 1}]},
                {},
                "",
                "resetOptions need a gymnasium environment",
            ),
            ("episodes-dealt", {"count": 3, "perTask": False}, {}, "", "among env.variants, and there are none"),
            (
                "checkpoint-twice",
                {"count": 3, "checkpoints": ["a", "a"]},
                _MLP,
                ".checkpoints",
                "checkpoint a is listed",
            ),
            ("sweep-and-weights", _SWEEP, {"policy": _MLP["policy"] | {"initialWeights": "a"}}, "", _IN_PLACE),
            ("sweep-of-random-actions", _SWEEP, {"policy": {"random": {}}}, "", _IN_PLACE),
        )
    },
    "episodes-past-the-last-seed": rule(
        "spec.collection.seed",
        "seed 2147483639 leaves no room for the episodes' own seeds",
        manifest(collection__seed=2**31 - 9, collection__episodes={"count": 10}, output=_RESULTS),
    ),
    "episodes-for-learners": rule(
        "spec.output", "collection.episodes needs a folder for its results", manifest(collection__episodes={"count": 3})
    ),
    "name-with-capital": schema("metadata.name", '"Pong" is not valid', manifest("Pong")),
    "name-begins-with-digit": schema("metadata.name", "beginning with a letter", manifest("1pong")),
    "name-too-long": schema("metadata.name", "has 41 characters; write at most 40", manifest("a" * 41)),
    "no-spec": schema("spec", "is missing", {key: value for key, value in manifest().items() if key != "spec"}),
    "spec-is-a-list": schema("spec", "[] is a list, not an object", manifest() | {"spec": []}),
    "tls-of-nothing": schema(
        "spec.head.tls", "exactly one of secretName and certManager is required, found neither", value={}
    ),
    "tls-of-both": schema(
        "spec.head.tls",
        "exactly one of secretName and certManager is required, found both",
        value={"secretName": "a", "certManager": {"issuerRef": {"name": "ca"}}},
    ),
    "no-env": schema("spec.env", "is missing", value=ABSENT),
    "no-policy": schema("spec.policy", "is missing", value=ABSENT),
    "null-policy": schema("spec.policy", "is missing", value=None),
    "no-frames-per-batch": schema("spec.collection.framesPerBatch", "is missing", value=ABSENT),
    "env-neither": rule("spec.env", "found none", value={}),
    "env-both": rule(
        "spec.env",
        "exactly one of envpool, gymnasium, vector, pettingzoo, openenv and jax is required, found several",
        manifest(env__gymnasium={"id": "CartPole-v1", "numEnvs": 8}),
    ),
    "policy-neither": rule("spec.policy", "entrypoint and agents is required, found 0", value={}),
    "policy-compiled-random": rule(
        "spec.policy", "compile auto and dtype float32 need policy.entrypoint", manifest(policy__compile="auto")
    ),
    "policy-both": rule(
        "spec.policy", "entrypoint and agents is required, found 2", manifest(policy__entrypoint="a:b")
    ),
    **{
        f"agents-{name}": rule("spec.policy.agents.red", sentence, _policies(red=policy, b=_B))
        for name, policy, sentence in (
            ("empty", {}, "write exactly one of random, entrypoint and model"),
            ("two", {"random": {}, "model": "b"}, "write exactly one of random, entrypoint and model"),
            ("random-version", {"random": {}, "version": 1}, "at most one of random, version and sample"),
            ("pinned-sample", {"model": "b", "version": 1, "sample": {}}, "at most one of random, version and"),
        )
    },
    "agents-unknown-model": rule(
        "spec.policy.agents", "model b is not a group with an entrypoint", _policies(red={"model": "b"})
    ),
    "agents-model-of-a-model": rule(
        "spec.policy.agents",
        "model b is not a group with an entrypoint",
        _policies(red={"model": "b"}, b={"model": "c"}, c={"entrypoint": "a:b"}),
    ),
    "agents-window": schema(
        "spec.policy.agents.red.sample.window",
        "0 is less than 1; write a number from 1 to 1024",
        _policies(red={**_B, "sample": {"window": 0}}),
    ),
    "agents-field": strict(
        "spec.policy.agents.red.versions", "did you mean version", _policies(red={**_B, "versions": 1})
    ),
    "agents-alone": rule(
        "spec.policy.agents",
        "agents need env.pettingzoo or env.envpool",
        manifest(
            env={"gymnasium": {"id": "CartPole-v1", "numEnvs": 8}}, policy={"agents": {"red": {"entrypoint": "a:b"}}}
        ),
    ),
    "gymnasium-neither": rule("spec.env.gymnasium", "found neither", gymnasium(id=None)),
    "gymnasium-both": rule(
        "spec.env.gymnasium", "found id CartPole-v1 and entrypoint a:b", gymnasium(entrypoint="a:b")
    ),
    "agents-neither": rule("spec.env.pettingzoo", "found neither", _agents()),
    "players-groups": schema("spec.env.envpool.groups", "perAgent", manifest(env__envpool__groups="peragent")),
    "agents-groups": schema("spec.env.pettingzoo.groups", "byName", _agents(id="a/b_v0", groups="byname")),
    "agents-no-groups": schema("spec.env.pettingzoo.groupMap", "", _agents(id="a/b_v0", groupMap={})),
    "jax-without-entrypoint": schema("spec.env.jax.entrypoint", "is missing", manifest(env={"jax": {"numEnvs": 8}})),
    "recycle-inline": rule(
        "spec.env.recycle",
        "recycle replaces processes of single environments; use gymnasium or pettingzoo with vectorization: subprocess",
        manifest(
            env={
                "gymnasium": {"id": "CartPole-v1", "numEnvs": 8, "vectorization": "inline"},
                "recycle": {"episodes": 100},
            }
        ),
    ),
    "recycle-negative": schema(
        "spec.env.recycle.rssMiB",
        "-1 is less than 0; write a number from 0",
        manifest(env={"gymnasium": {"id": "CartPole-v1", "numEnvs": 8}, "recycle": {"rssMiB": -1}}),
    ),
    "jax-variants": rule(
        "spec.env.variants",
        "a JAX environment has one setting; remove variants",
        manifest(env={"jax": {"entrypoint": "a:b", "numEnvs": 8}, "variants": [{"name": "a"}]}),
    ),
    "vector-neither": rule("spec.env.vector", "found neither", _vector()),
    "vector-kwargs-num-envs": rule(
        "spec.env.vector.kwargs",
        "kwargs cannot have num_envs: write vector.numEnvs instead",
        _vector(id="CartPole-v1", kwargs={"num_envs": 4}),
    ),
    "vector-batch-not-multiple": rule(
        "spec.collection.framesPerBatch",
        "framesPerBatch 64 is not a multiple of numEnvs 7",
        _vector(id="CartPole-v1", numEnvs=7),
    ),
    "vector-limit": rule(
        "spec.env.vector",
        "a vector environment has one setting and limits its own episodes; remove variants and maxEpisodeSteps",
        manifest(env={"vector": {"id": "CartPole-v1", "numEnvs": 8}, "maxEpisodeSteps": 5}),
    ),
    "openenv-neither": rule("spec.env.openenv", "found neither; write image for a server beside", _openenv()),
    "openenv-both": rule("spec.env.openenv", "found image a:1 and url http://b", _openenv(image="a:1", url="http://b")),
    "openenv-variants": rule(
        "spec.env.variants",
        "all sessions of an OpenEnv server are reset alike",
        manifest(env={"openenv": {"url": "http://b", "numEnvs": 8}, "variants": [{"name": "a"}]}),
    ),
    "openenv-url": schema(
        "spec.env.openenv.url",
        "is not valid; write an address such as",
        manifest(env={"openenv": {"url": "127.0.0.1:8000", "numEnvs": 8}}),
    ),
    "vector-variants": rule(
        "spec.env.vector",
        "a vector environment has one setting",
        manifest(env={"vector": {"id": "CartPole-v1", "numEnvs": 8}, "variants": [{"name": "a"}]}),
    ),
    "output-neither": rule("spec.output", "both missing", value={}),
    "no-envs": schema("spec.env.envpool.numEnvs", "0 is less than 1; write a number from 1 to 65536", value=0),
    "too-many-envs": schema("spec.env.envpool.numEnvs", "65537 is greater than 65536", value=65537),
    "empty-task": schema("spec.env.envpool.taskId", "is empty", value=""),
    "batch-not-multiple": rule(
        "spec.collection.framesPerBatch",
        "framesPerBatch 100 is not a multiple of numEnvs 8; write a multiple of it, for example 104",
        value=100,
    ),
    "batch-below-envs": rule(
        "spec.collection.framesPerBatch",
        "framesPerBatch 4 is not a multiple of numEnvs 8; write a multiple of it, for example 8",
        value=4,
    ),
    "batch-not-multiple-gymnasium": rule(
        "spec.collection.framesPerBatch",
        "framesPerBatch 64 is not a multiple of numEnvs 7",
        manifest(env={"gymnasium": {"id": "CartPole-v1", "numEnvs": 7}}),
    ),
    "batch-size-above-envs": rule("spec.env.envpool.batchSize", "batchSize 16 does not divide numEnvs 8", value=16),
    "batch-size-no-divisor": rule("spec.env.envpool.batchSize", "batchSize 3 does not divide numEnvs 8", value=3),
    "variant-twice": schema(
        "spec.env.variants",
        "the name easy occurs twice in variants; give each variant a name of its own",
        value=[{"name": "easy"}, {"name": "hard"}, {"name": "easy"}],
    ),
    "variant-without-weight": schema(
        "spec.env.variants[0].weight", "0", manifest(env__variants=[{"name": "easy", "weight": 0}])
    ),
    "variant-of-a-factory-with-a-task": rule(
        "spec.env.variants",
        "a variant has a taskId, but gymnasium.entrypoint names a factory; write kwargs, or use gymnasium.id",
        manifest(
            env={
                "gymnasium": {"entrypoint": "a:b", "numEnvs": 8},
                "variants": [{"name": "easy"}, {"name": "hard", "taskId": "CartPole-v1"}],
            }
        ),
    ),
    "variants-of-an-asynchronous-pool": rule(
        "spec.env.variants",
        "variants step in lockstep, found batchSize 4; set batchSize: 0",
        manifest(env__envpool__batchSize=4, env__variants=[{"name": "easy"}]),
    ),
    "multi-step-gamma": rule(
        "spec.collection.multiStep.gamma",
        "gamma 0 would discard all future rewards",
        manifest(collection__multiStep={"steps": 3, "gamma": 0.0}),
    ),
    "multi-step-for-nobody": rule(
        "spec.collection",
        "multiStep and splitTrajectories need output.queue",
        manifest(collection__multiStep={"steps": 3}, output={"dataset": {"uri": "file:///data/x"}}),
    ),
    "normalize-nothing": rule(
        "spec.collection.normalize", "normalize is empty; write observation: {}, reward: {} or both", value={}
    ),
    "normalize-key-twice": rule(
        "spec.collection.normalize.observation.keys", "keys contains a key twice", value=["pos", "arm", "pos"]
    ),
    "normalize-gamma": schema("spec.collection.normalize.reward.gamma", "1.01 is greater than 1", value=1.01),
    "normalize-clip": schema("spec.collection.normalize.observation.clip", "-1 is less than 0", value=-1),
    "preempt-async": rule(
        "spec.collection.preemptiveThreshold", "preemptiveThreshold below 1 needs mode sync", value=0.5
    ),
    "preempt-nobody": rule(
        "spec.collection.preemptiveThreshold",
        "preemptiveThreshold 0 would not wait for any worker",
        manifest(collection__mode="sync", collection__preemptiveThreshold=0.0),
    ),
    "preempt-too-many": schema(
        "spec.collection.preemptiveThreshold",
        "1.5 is greater than 1",
        manifest(collection__mode="sync", collection__preemptiveThreshold=1.5),
    ),
    "bfloat16-for-nobody": rule(
        "spec.collection.bfloat16",
        "bfloat16 needs output.queue",
        manifest(collection__bfloat16=["logits"], output={"dataset": {"uri": "file:///data/x"}}),
    ),
    **{
        f"envpool-kwargs-{name}": rule(
            "spec.env.envpool.kwargs",
            "write envpool.numEnvs, batchSize and numThreads, env.maxEpisodeSteps and collection.seed instead",
            value={name: 100},
        )
        for name in ("num_envs", "batch_size", "num_threads", "max_episode_steps", "seed", "env_seed")
    },
    "reset-with-steps-in-flight": rule(
        "spec.collection.resetAtEachBatch",
        "resetAtEachBatch needs envpool.batchSize 0",
        manifest(env__envpool__batchSize=4, collection__resetAtEachBatch=True),
    ),
    "split-for-nobody": rule(
        "spec.collection",
        "multiStep and splitTrajectories need output.queue",
        manifest(collection__splitTrajectories=True, output={"dataset": {"uri": "file:///data/x"}}),
    ),
    "no-frames": schema("spec.collection.totalFrames", "0 is less than 1", value=0),
    "frames-overflow": schema("spec.collection.totalFrames", "is greater than", value=2**63),
    "frames-huge-float": schema("spec.collection.totalFrames", "1e+30 is greater than", value=1e30),
    "batch-overflows-int32": schema(
        "spec.collection.framesPerBatch", "2147483648 is greater than 2147483647", value=2**31
    ),
    "fraction": schema("spec.collection.framesPerBatch", "64.5 is not an integer", value=64.5),
    "quoted-number": schema(
        "spec.collection.framesPerBatch", '"64" is a string, not an integer; write it without quotes', value="64"
    ),
    "boolean-for-number": schema("spec.replicas", "true is a boolean, not an integer", value=True),
    "boolean-for-string": schema("spec.image", "false is a boolean, not a string; quote it", value=False),
    "string-for-boolean": schema("spec.suspend", '"no" is a string, not true or false', value="no"),
    "kwargs-is-a-list": schema("spec.env.envpool.kwargs", "[] is a list, not an object", value=[]),
    "unknown-mode": schema(
        "spec.collection.mode", '"asynch" is not one of sync, async; did you mean async?', value="asynch"
    ),
    "unknown-device": schema(
        "spec.workerGroups[0].device", "did you mean gpu?", groups({"name": "cpu", "device": "GPU"})
    ),
    "entrypoint-without-colon": schema(
        "spec.policy.entrypoint", "write package.module:attribute", manifest(policy={"entrypoint": "my_pkg.policies"})
    ),
    "empty-uri": schema("spec.output.dataset.uri", "is empty", value=""),
    "no-groups": schema("spec.workerGroups", "has 0 items; write at least 1", groups()),
    "nine-groups": schema(
        "spec.workerGroups",
        "has 9 items; write at most 8",
        groups({"name": "a"}, *({"name": f"g{index}", "replicas": 1} for index in range(8))),
    ),
    "group-is-null": schema("spec.workerGroups[0]", "null is null, not an object", manifest(workerGroups=[None])),
    "group-without-name": schema("spec.workerGroups[0].name", "is missing", groups({})),
    "group-name-too-long": schema(
        "spec.workerGroups[0].name", "has 11 characters; write at most 10", groups({"name": "a" * 11})
    ),
    "group-twice": schema("spec.workerGroups", 'the names ["cpu", "cpu"] are not unique', groups(CPU, {"name": "cpu"})),
    "no-such-elastic-group": rule(
        "spec.elasticGroup",
        'elasticGroup gpu is not a worker group; use one of ["cpu"]',
        groups(CPU, elasticGroup="gpu"),
    ),
    "elastic-group-sized-twice": rule(
        "spec.workerGroups",
        "replicas of the elastic group cpu must not be set, because spec.replicas 2 sizes it",
        groups({"name": "cpu", "replicas": 3}, replicas=2),
    ),
    "fixed-group-without-size": rule(
        "spec.workerGroups", "replicas is missing in group gpu", groups(CPU, {"name": "gpu"})
    ),
    "fixed-group-with-bounds": rule(
        "spec.workerGroups",
        "minReplicas and maxReplicas must not be set in group gpu, because cpu is the elastic group",
        groups(CPU, GPU | {"maxReplicas": 2}),
    ),
    "replicas-below-min": rule(
        "spec.replicas",
        "replicas 3 is less than minReplicas 4 of the elastic group cpu",
        groups({"name": "cpu", "minReplicas": 4}, replicas=3),
    ),
    "replicas-above-max": rule(
        "spec.replicas",
        "replicas 5 is greater than maxReplicas 4 of the elastic group cpu",
        groups({"name": "cpu", "maxReplicas": 4}, replicas=5),
    ),
    "bounds-in-reverse": rule(
        "spec.workerGroups[0].minReplicas",
        "minReplicas 4 is greater than maxReplicas 2",
        groups({"name": "cpu", "minReplicas": 4, "maxReplicas": 2}, replicas=4),
    ),
    "only-servers": rule(
        "spec.workerGroups",
        'all groups ["act"] have role inference and no group collects; add a group with role collect',
        groups({"name": "act", "role": "inference"}, policy=MLP),
    ),
    "servers-of-random-actions": rule(
        "spec.workerGroups",
        "random actions need no inference servers; remove the groups with role inference, or name a policy",
        groups(CPU, SERVERS),
    ),
    "inference-without-servers": rule(
        "spec.inference",
        'inference is for groups with role inference, and no group of ["cpu"] has it',
        groups(CPU, policy=MLP, inference={"maxBatch": 64}),
    ),
    "elastic-servers": rule(
        "spec.elasticGroup",
        "spec.replicas sizes group act, which has role inference; name a group that collects in elasticGroup",
        groups({"name": "act", "role": "inference"}, {"name": "cpu", "replicas": 1}, policy=MLP),
    ),
    "no-servers": rule(
        "spec.workerGroups",
        "all groups with role inference have 0 replicas, and workers cannot act without servers",
        groups(CPU, {**SERVERS, "replicas": 0}, policy=MLP),
    ),
    "autoscale-of-servers": rule(
        "spec.workerGroups[1].autoscale",
        "autoscale adds workers that step environments, and group gpu has role inference; remove autoscale",
        groups(CPU, {**SERVERS, "autoscale": {"maxReplicas": 4}}, policy=MLP),
    ),
    "servers-of-an-evaluation": rule(
        "spec.workerGroups",
        "an evaluation asks the policy for one row at a time, in the workers; remove the groups with role",
        groups(
            CPU,
            SERVERS,
            policy=MLP,
            collection={"framesPerBatch": 64, "episodes": {"count": 4}},
            output={"dataset": {"uri": "data/x"}},
        ),
    ),
    "autoscale-bounds-in-reverse": rule(
        "spec.workerGroups[0].autoscale.minReplicas",
        "minReplicas 4 is greater than maxReplicas 2",
        groups({"name": "cpu", "autoscale": {"minReplicas": 4, "maxReplicas": 2}}),
    ),
    "autoscale-without-a-queue": rule(
        "spec.workerGroups",
        "nothing says how many workers are needed; add output.queue: {} or remove autoscale",
        groups({"name": "cpu", "autoscale": {"maxReplicas": 2}}, output={"dataset": {"uri": "data/x"}}),
    ),
    "negative-replicas": schema("spec.replicas", "-1 is less than 0", value=-1),
    "no-unavailable": schema(
        "spec.runPolicy.maxUnavailable", "0: write a whole number from 1, or a percentage from 1% to 100%", value=0
    ),
    "unavailable-without-percent": schema(
        "spec.runPolicy.maxUnavailable", '"5": write a whole number from 1, or a percentage from 1% to 100%', value="5"
    ),
    "unknown-field": strict("spec.env.envpool.num_envs", "unknown field; did you mean numEnvs?", value=8),
    "unknown-field-without-neighbor": strict(
        "spec.output.queue.zzz", "unknown field; valid fields: capacityBatches, onFull", value=1
    ),
    "random-has-no-options": strict(
        "spec.policy.random.seed", "unknown field; no fields are allowed here, write {}", value=1
    ),
    "managed-by-no-controller": schema(
        "spec.managedBy",
        '"kueue" is not valid; write a domain, a slash and a name, such as example.com/controller',
        value="kueue",
    ),
    "unknown-metadata": strict(
        "metadata.lables",
        "unknown field; did you mean labels?",
        manifest() | {"metadata": {"name": "pong", "lables": {}}},
    ),
    "unknown-at-the-top": strict("specs", "unknown field; did you mean spec?", manifest() | {"specs": {}}),
}
