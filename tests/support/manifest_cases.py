"""Manifests and the verdict on each: one table for pydantic, for the CRD offline, and for a real API server."""

from manifest_making import ABSENT, Case, Document, groups, gymnasium, manifest

CPU, GPU = {"name": "cpu"}, {"name": "gpu", "device": "gpu", "replicas": 1}
SERVERS = {**GPU, "role": "inference"}
MLP = {"entrypoint": "cormorant_worker.policies:mlp"}

_WON, _SUCCESS = {"key": "won"}, {"name": "success", "key": "won"}
_MLP = {"policy": {"entrypoint": "cormorant_worker.policies:mlp"}}
_SWEEP = {"count": 3, "checkpoints": ["a", "b"]}
_IN_PLACE = "checkpoints are weights for policy.entrypoint in place of policy.initialWeights"
_ONE_LIST = "exactly one of count, seeds and resetOptions is required"
_RESULTS = {"dataset": {"uri": "s3://b/results"}}


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
    "timeouts": gymnasium(stepTimeoutSeconds=5, resetTimeoutSeconds=5, maxRestarts=0, vectorization="inline"),
    "episodes-counted": manifest(collection__episodes={"count": 100, "deterministic": False}, output=_RESULTS),
    "episodes-by-seed": manifest(collection__episodes={"seeds": [3, 0, 2**31 - 1]}, output=_RESULTS),
    "episodes-by-options": manifest(
        env={"gymnasium": {"id": "CartPole-v1", "numEnvs": 8}},
        collection__episodes={"resetOptions": [{"low": -0.1, "high": 0.1}, {}]},
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
            document=manifest(env__info=info, **({"collection__episodeMetrics": metrics} if metrics else {})),
            path=f"spec.{'collection.episodeMetrics' if metrics else 'env.info'}{field}",
            sentence=sentence,
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
            document=manifest(collection__episodes=episodes, output=_RESULTS, **more),
            path=f"spec.collection.episodes{field}",
            sentence=sentence,
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
    "episodes-past-the-last-seed": Case(
        document=manifest(collection__seed=2**31 - 9, collection__episodes={"count": 10}, output=_RESULTS),
        path="spec.collection.seed",
        sentence="seed 2147483639 leaves no room for the episodes' own seeds",
        by="rule",
    ),
    "episodes-for-learners": Case(
        document=manifest(collection__episodes={"count": 3}),
        path="spec.output",
        sentence="collection.episodes needs a folder for its results",
        by="rule",
    ),
    "name-with-capital": Case(document=manifest("Pong"), path="metadata.name", sentence='"Pong" is not valid'),
    "name-begins-with-digit": Case(
        document=manifest("1pong"), path="metadata.name", sentence="beginning with a letter"
    ),
    "name-too-long": Case(
        document=manifest("a" * 41), path="metadata.name", sentence="has 41 characters; write at most 40"
    ),
    "no-spec": Case(
        document={key: value for key, value in manifest().items() if key != "spec"}, path="spec", sentence="is missing"
    ),
    "spec-is-a-list": Case(document=manifest() | {"spec": []}, path="spec", sentence="[] is a list, not an object"),
    "tls-of-nothing": Case(
        document=manifest(head={"tls": {}}),
        path="spec.head.tls",
        sentence="exactly one of secretName and certManager is required, found neither",
    ),
    "tls-of-both": Case(
        document=manifest(head={"tls": {"secretName": "a", "certManager": {"issuerRef": {"name": "ca"}}}}),
        path="spec.head.tls",
        sentence="exactly one of secretName and certManager is required, found both",
    ),
    "no-env": Case(document=manifest(env=ABSENT), path="spec.env", sentence="is missing"),
    "no-policy": Case(document=manifest(policy=ABSENT), path="spec.policy", sentence="is missing"),
    "null-policy": Case(document=manifest(policy=None), path="spec.policy", sentence="is missing"),
    "no-frames-per-batch": Case(
        document=manifest(collection__framesPerBatch=ABSENT),
        path="spec.collection.framesPerBatch",
        sentence="is missing",
    ),
    "env-neither": Case(document=manifest(env={}), path="spec.env", sentence="found neither", by="rule"),
    "env-both": Case(
        document=manifest(env__gymnasium={"id": "CartPole-v1", "numEnvs": 8}),
        path="spec.env",
        sentence="exactly one of envpool and gymnasium is required, found both",
        by="rule",
    ),
    "policy-neither": Case(document=manifest(policy={}), path="spec.policy", sentence="found neither", by="rule"),
    "policy-compiled-random": Case(
        document=manifest(policy__compile="auto"),
        path="spec.policy",
        sentence="compile auto and dtype float32 need an entrypoint",
        by="rule",
    ),
    "policy-both": Case(
        document=manifest(policy__entrypoint="a:b"),
        path="spec.policy",
        sentence="found random and entrypoint a:b",
        by="rule",
    ),
    "gymnasium-neither": Case(
        document=gymnasium(id=None), path="spec.env.gymnasium", sentence="found neither", by="rule"
    ),
    "gymnasium-both": Case(
        document=gymnasium(entrypoint="a:b"),
        path="spec.env.gymnasium",
        sentence="found id CartPole-v1 and entrypoint a:b",
        by="rule",
    ),
    "output-neither": Case(document=manifest(output={}), path="spec.output", sentence="both missing", by="rule"),
    "no-envs": Case(
        document=manifest(env__envpool__numEnvs=0),
        path="spec.env.envpool.numEnvs",
        sentence="0 is less than 1; write a number from 1 to 65536",
    ),
    "too-many-envs": Case(
        document=manifest(env__envpool__numEnvs=65537),
        path="spec.env.envpool.numEnvs",
        sentence="65537 is greater than 65536",
    ),
    "empty-task": Case(document=manifest(env__envpool__taskId=""), path="spec.env.envpool.taskId", sentence="is empty"),
    "batch-not-multiple": Case(
        document=manifest(collection__framesPerBatch=100),
        path="spec.collection.framesPerBatch",
        sentence="framesPerBatch 100 is not a multiple of numEnvs 8; write a multiple of it, for example 104",
        by="rule",
    ),
    "batch-below-envs": Case(
        document=manifest(collection__framesPerBatch=4),
        path="spec.collection.framesPerBatch",
        sentence="framesPerBatch 4 is not a multiple of numEnvs 8; write a multiple of it, for example 8",
        by="rule",
    ),
    "batch-not-multiple-gymnasium": Case(
        document=manifest(env={"gymnasium": {"id": "CartPole-v1", "numEnvs": 7}}),
        path="spec.collection.framesPerBatch",
        sentence="framesPerBatch 64 is not a multiple of numEnvs 7",
        by="rule",
    ),
    "batch-size-above-envs": Case(
        document=manifest(env__envpool__batchSize=16),
        path="spec.env.envpool.batchSize",
        sentence="batchSize 16 does not divide numEnvs 8",
        by="rule",
    ),
    "batch-size-no-divisor": Case(
        document=manifest(env__envpool__batchSize=3),
        path="spec.env.envpool.batchSize",
        sentence="batchSize 3 does not divide numEnvs 8",
        by="rule",
    ),
    "variant-twice": Case(
        document=manifest(env__variants=[{"name": "easy"}, {"name": "hard"}, {"name": "easy"}]),
        path="spec.env.variants",
        sentence="the name easy occurs twice in variants; give each variant a name of its own",
    ),
    "variant-without-weight": Case(
        document=manifest(env__variants=[{"name": "easy", "weight": 0}]),
        path="spec.env.variants[0].weight",
        sentence="0",
    ),
    "variant-of-a-factory-with-a-task": Case(
        document=manifest(
            env={
                "gymnasium": {"entrypoint": "a:b", "numEnvs": 8},
                "variants": [{"name": "easy"}, {"name": "hard", "taskId": "CartPole-v1"}],
            }
        ),
        path="spec.env.variants",
        sentence="a variant has a taskId, but gymnasium.entrypoint names a factory; write kwargs, or use gymnasium.id",
        by="rule",
    ),
    "variants-of-an-asynchronous-pool": Case(
        document=manifest(env__envpool__batchSize=4, env__variants=[{"name": "easy"}]),
        path="spec.env.variants",
        sentence="variants step in lockstep, found batchSize 4; set batchSize: 0",
        by="rule",
    ),
    "multi-step-gamma": Case(
        document=manifest(collection__multiStep={"steps": 3, "gamma": 0.0}),
        path="spec.collection.multiStep.gamma",
        sentence="gamma 0 would discard all future rewards",
        by="rule",
    ),
    "multi-step-for-nobody": Case(
        document=manifest(collection__multiStep={"steps": 3}, output={"dataset": {"uri": "file:///data/x"}}),
        path="spec.collection",
        sentence="multiStep and splitTrajectories need output.queue",
        by="rule",
    ),
    "normalize-nothing": Case(
        document=manifest(collection__normalize={}),
        path="spec.collection.normalize",
        sentence="normalize is empty; write observation: {}, reward: {} or both",
        by="rule",
    ),
    "normalize-key-twice": Case(
        document=manifest(collection__normalize={"observation": {"keys": ["pos", "arm", "pos"]}}),
        path="spec.collection.normalize.observation.keys",
        sentence="keys contains a key twice",
        by="rule",
    ),
    "normalize-gamma": Case(
        document=manifest(collection__normalize={"reward": {"gamma": 1.01}}),
        path="spec.collection.normalize.reward.gamma",
        sentence="1.01 is greater than 1",
    ),
    "normalize-clip": Case(
        document=manifest(collection__normalize={"observation": {"clip": -1}}),
        path="spec.collection.normalize.observation.clip",
        sentence="-1 is less than 0",
    ),
    "preempt-async": Case(
        document=manifest(collection__preemptiveThreshold=0.5),
        path="spec.collection.preemptiveThreshold",
        sentence="preemptiveThreshold below 1 needs mode sync",
        by="rule",
    ),
    "preempt-nobody": Case(
        document=manifest(collection__mode="sync", collection__preemptiveThreshold=0.0),
        path="spec.collection.preemptiveThreshold",
        sentence="preemptiveThreshold 0 would not wait for any worker",
        by="rule",
    ),
    "preempt-too-many": Case(
        document=manifest(collection__mode="sync", collection__preemptiveThreshold=1.5),
        path="spec.collection.preemptiveThreshold",
        sentence="1.5 is greater than 1",
    ),
    "bfloat16-for-nobody": Case(
        document=manifest(collection__bfloat16=["logits"], output={"dataset": {"uri": "file:///data/x"}}),
        path="spec.collection.bfloat16",
        sentence="bfloat16 needs output.queue",
        by="rule",
    ),
    **{
        f"envpool-kwargs-{name}": Case(
            document=manifest(env__envpool__kwargs={name: 100}),
            path="spec.env.envpool.kwargs",
            sentence="write envpool.numEnvs, batchSize and numThreads, env.maxEpisodeSteps and collection.seed instead",
            by="rule",
        )
        for name in ("num_envs", "batch_size", "num_threads", "max_episode_steps", "seed", "env_seed")
    },
    "reset-with-steps-in-flight": Case(
        document=manifest(env__envpool__batchSize=4, collection__resetAtEachBatch=True),
        path="spec.collection.resetAtEachBatch",
        sentence="resetAtEachBatch needs envpool.batchSize 0",
        by="rule",
    ),
    "split-for-nobody": Case(
        document=manifest(collection__splitTrajectories=True, output={"dataset": {"uri": "file:///data/x"}}),
        path="spec.collection",
        sentence="multiStep and splitTrajectories need output.queue",
        by="rule",
    ),
    "no-frames": Case(
        document=manifest(collection__totalFrames=0), path="spec.collection.totalFrames", sentence="0 is less than 1"
    ),
    "frames-overflow": Case(
        document=manifest(collection__totalFrames=2**63), path="spec.collection.totalFrames", sentence="is greater than"
    ),
    "frames-huge-float": Case(
        document=manifest(collection__totalFrames=1e30),
        path="spec.collection.totalFrames",
        sentence="1e+30 is greater than",
    ),
    "batch-overflows-int32": Case(
        document=manifest(collection__framesPerBatch=2**31),
        path="spec.collection.framesPerBatch",
        sentence="2147483648 is greater than 2147483647",
    ),
    "fraction": Case(
        document=manifest(collection__framesPerBatch=64.5),
        path="spec.collection.framesPerBatch",
        sentence="64.5 is not an integer",
    ),
    "quoted-number": Case(
        document=manifest(collection__framesPerBatch="64"),
        path="spec.collection.framesPerBatch",
        sentence='"64" is a string, not an integer; write it without quotes',
    ),
    "boolean-for-number": Case(
        document=manifest(replicas=True), path="spec.replicas", sentence="true is a boolean, not an integer"
    ),
    "boolean-for-string": Case(
        document=manifest(image=False), path="spec.image", sentence="false is a boolean, not a string; quote it"
    ),
    "string-for-boolean": Case(
        document=manifest(suspend="no"), path="spec.suspend", sentence='"no" is a string, not true or false'
    ),
    "kwargs-is-a-list": Case(
        document=manifest(env__envpool__kwargs=[]),
        path="spec.env.envpool.kwargs",
        sentence="[] is a list, not an object",
    ),
    "unknown-mode": Case(
        document=manifest(collection__mode="asynch"),
        path="spec.collection.mode",
        sentence='"asynch" is not one of sync, async; did you mean async?',
    ),
    "unknown-device": Case(
        document=groups({"name": "cpu", "device": "GPU"}),
        path="spec.workerGroups[0].device",
        sentence="did you mean gpu?",
    ),
    "entrypoint-without-colon": Case(
        document=manifest(policy={"entrypoint": "my_pkg.policies"}),
        path="spec.policy.entrypoint",
        sentence="write package.module:attribute",
    ),
    "empty-uri": Case(
        document=manifest(output={"dataset": {"uri": ""}}), path="spec.output.dataset.uri", sentence="is empty"
    ),
    "no-groups": Case(document=groups(), path="spec.workerGroups", sentence="has 0 items; write at least 1"),
    "nine-groups": Case(
        document=groups({"name": "a"}, *({"name": f"g{index}", "replicas": 1} for index in range(8))),
        path="spec.workerGroups",
        sentence="has 9 items; write at most 8",
    ),
    "group-is-null": Case(
        document=manifest(workerGroups=[None]), path="spec.workerGroups[0]", sentence="null is null, not an object"
    ),
    "group-without-name": Case(document=groups({}), path="spec.workerGroups[0].name", sentence="is missing"),
    "group-name-too-long": Case(
        document=groups({"name": "a" * 11}),
        path="spec.workerGroups[0].name",
        sentence="has 11 characters; write at most 10",
    ),
    "group-twice": Case(
        document=groups(CPU, {"name": "cpu"}),
        path="spec.workerGroups",
        sentence='the names ["cpu", "cpu"] are not unique',
    ),
    "no-such-elastic-group": Case(
        document=groups(CPU, elasticGroup="gpu"),
        path="spec.elasticGroup",
        sentence='elasticGroup gpu is not a worker group; use one of ["cpu"]',
        by="rule",
    ),
    "elastic-group-sized-twice": Case(
        document=groups({"name": "cpu", "replicas": 3}, replicas=2),
        path="spec.workerGroups",
        sentence="replicas of the elastic group cpu must not be set, because spec.replicas 2 sizes it",
        by="rule",
    ),
    "fixed-group-without-size": Case(
        document=groups(CPU, {"name": "gpu"}),
        path="spec.workerGroups",
        sentence="replicas is missing in group gpu",
        by="rule",
    ),
    "fixed-group-with-bounds": Case(
        document=groups(CPU, GPU | {"maxReplicas": 2}),
        path="spec.workerGroups",
        sentence="minReplicas and maxReplicas must not be set in group gpu, because cpu is the elastic group",
        by="rule",
    ),
    "replicas-below-min": Case(
        document=groups({"name": "cpu", "minReplicas": 4}, replicas=3),
        path="spec.replicas",
        sentence="replicas 3 is less than minReplicas 4 of the elastic group cpu",
        by="rule",
    ),
    "replicas-above-max": Case(
        document=groups({"name": "cpu", "maxReplicas": 4}, replicas=5),
        path="spec.replicas",
        sentence="replicas 5 is greater than maxReplicas 4 of the elastic group cpu",
        by="rule",
    ),
    "bounds-in-reverse": Case(
        document=groups({"name": "cpu", "minReplicas": 4, "maxReplicas": 2}, replicas=4),
        path="spec.workerGroups[0].minReplicas",
        sentence="minReplicas 4 is greater than maxReplicas 2",
        by="rule",
    ),
    "only-servers": Case(
        document=groups({"name": "act", "role": "inference"}, policy=MLP),
        path="spec.workerGroups",
        sentence='all groups ["act"] have role inference and no group collects; add a group with role collect',
        by="rule",
    ),
    "servers-of-random-actions": Case(
        document=groups(CPU, SERVERS),
        path="spec.workerGroups",
        sentence="random actions need no inference servers; remove the groups with role inference, or name a policy",
        by="rule",
    ),
    "inference-without-servers": Case(
        document=groups(CPU, policy=MLP, inference={"maxBatch": 64}),
        path="spec.inference",
        sentence='inference is for groups with role inference, and no group of ["cpu"] has it',
        by="rule",
    ),
    "elastic-servers": Case(
        document=groups({"name": "act", "role": "inference"}, {"name": "cpu", "replicas": 1}, policy=MLP),
        path="spec.elasticGroup",
        sentence="spec.replicas sizes group act, which has role inference; name a group that collects in elasticGroup",
        by="rule",
    ),
    "no-servers": Case(
        document=groups(CPU, {**SERVERS, "replicas": 0}, policy=MLP),
        path="spec.workerGroups",
        sentence="all groups with role inference have 0 replicas, and workers cannot act without servers",
        by="rule",
    ),
    "autoscale-of-servers": Case(
        document=groups(CPU, {**SERVERS, "autoscale": {"maxReplicas": 4}}, policy=MLP),
        path="spec.workerGroups[1].autoscale",
        sentence="autoscale adds workers that step environments, and group gpu has role inference; remove autoscale",
        by="rule",
    ),
    "servers-of-an-evaluation": Case(
        document=groups(
            CPU,
            SERVERS,
            policy=MLP,
            collection={"framesPerBatch": 64, "episodes": {"count": 4}},
            output={"dataset": {"uri": "data/x"}},
        ),
        path="spec.workerGroups",
        sentence="an evaluation asks the policy for one row at a time, in the workers; remove the groups with role",
        by="rule",
    ),
    "autoscale-bounds-in-reverse": Case(
        document=groups({"name": "cpu", "autoscale": {"minReplicas": 4, "maxReplicas": 2}}),
        path="spec.workerGroups[0].autoscale.minReplicas",
        sentence="minReplicas 4 is greater than maxReplicas 2",
        by="rule",
    ),
    "autoscale-without-a-queue": Case(
        document=groups({"name": "cpu", "autoscale": {"maxReplicas": 2}}, output={"dataset": {"uri": "data/x"}}),
        path="spec.workerGroups",
        sentence="nothing says how many workers are needed; add output.queue: {} or remove autoscale",
        by="rule",
    ),
    "negative-replicas": Case(document=manifest(replicas=-1), path="spec.replicas", sentence="-1 is less than 0"),
    "no-unavailable": Case(
        document=manifest(runPolicy={"maxUnavailable": 0}),
        path="spec.runPolicy.maxUnavailable",
        sentence="0: write a whole number from 1, or a percentage from 1% to 100%",
    ),
    "unavailable-without-percent": Case(
        document=manifest(runPolicy={"maxUnavailable": "5"}),
        path="spec.runPolicy.maxUnavailable",
        sentence='"5": write a whole number from 1, or a percentage from 1% to 100%',
    ),
    "unknown-field": Case(
        document=manifest(env__envpool__num_envs=8),
        path="spec.env.envpool.num_envs",
        sentence="unknown field; did you mean numEnvs?",
        by="strict",
    ),
    "unknown-field-without-neighbour": Case(
        document=manifest(output={"queue": {"zzz": 1}}),
        path="spec.output.queue.zzz",
        sentence="unknown field; valid fields: capacityBatches, onFull",
        by="strict",
    ),
    "random-has-no-options": Case(
        document=manifest(policy={"random": {"seed": 1}}),
        path="spec.policy.random.seed",
        sentence="unknown field; no fields are allowed here, write {}",
        by="strict",
    ),
    "managed-by-no-controller": Case(
        document=manifest(managedBy="kueue"),
        path="spec.managedBy",
        sentence='"kueue" is not valid; write a domain, a slash and a name, such as example.com/controller',
    ),
    "unknown-metadata": Case(
        document=manifest() | {"metadata": {"name": "pong", "lables": {}}},
        path="metadata.lables",
        sentence="unknown field; did you mean labels?",
        by="strict",
    ),
    "unknown-at-the-top": Case(
        document=manifest() | {"specs": {}}, path="specs", sentence="unknown field; did you mean spec?", by="strict"
    ),
}
