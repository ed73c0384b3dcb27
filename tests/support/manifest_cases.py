"""Manifests and the verdict on each: one table for pydantic, for the CRD offline, and for a real API server. Also
changes of manifests that an API server accepts or refuses, and generated ones for property tests.
"""

from functools import partial
from typing import Any, NamedTuple

from hypothesis import strategies as st

from cormorant_contract.parsing import parse_job
from manifest_making import ABSENT, At, Case, Document, groups, gymnasium, manifest

CPU, GPU = {"name": "cpu"}, {"name": "gpu", "device": "gpu", "replicas": 1}
SERVERS = {**GPU, "role": "inference"}
_B = {"entrypoint": "a:b"}
MLP = {"entrypoint": "cormorant.policies:mlp"}

_WON, _SUCCESS = {"key": "won"}, {"name": "success", "key": "won"}
_SWEEP = {"count": 3, "checkpoints": ["a", "b"]}
_IN_PLACE = "checkpoints are weights for policy.entrypoint in place of policy.initialWeights"
_RESULTS = {"dataset": {"uri": "s3://b/results"}}


def _env(kind: str, **fields: object) -> Document:
    return manifest(env={kind: {"numEnvs": 8} | fields})


_vector, _openenv, _agents = (partial(_env, kind) for kind in ("vector", "openenv", "pettingzoo"))


def _policies(**agents: object) -> Document:
    return manifest(env={"pettingzoo": {"id": "a", "numEnvs": 8}}, policy={"agents": agents})


def _episodes(episodes: Document, **more: object) -> Document:
    return manifest(collection__episodes=episodes, output=_RESULTS, **more)


def _metrics(info: list[Document] | None, *metrics: Document) -> Document:
    return manifest(env__info=info, collection__episodeMetrics=list(metrics))


VALID: dict[str, Document] = {
    "smallest": manifest(),
    "half-batches": manifest(env__envpool__batchSize=4),
    "whole-float": manifest(collection__framesPerBatch=64.0),
    "null-block-is-absent": manifest(env__gymnasium=None, output={"queue": {}, "dataset": None}),
    "null-with-default": manifest(collection__seed=None),
    "null-inside-kwargs": manifest(env__envpool__kwargs={"noop_max": None, "deep": {"x": [None, 1.5]}}),
    "largest-count": manifest(collection__totalFrames=2**53 - 1),
    "preemptive": manifest(collection__mode="sync", collection__preemptiveThreshold=0.75),
    "players": manifest(env__envpool__groups="perAgent"),
    "queue-and-dataset": manifest(output={"queue": {"onFull": "drop_oldest"}, "dataset": {"uri": "s3://b/pong"}}),
    "variants": manifest(env__variants=[{"name": "easy"}, {"name": "hard", "weight": 3, "kwargs": {"a": None}}]),
    "variants-of-tasks": manifest(env__variants=[{"name": "Pong", "taskId": "Pong-v5"}, {"name": "b.0"}]),
    "factory": gymnasium(id=None, entrypoint="my_pkg.envs:make"),
    "wrapped": gymnasium(
        wrappers=[{"entrypoint": "gymnasium.wrappers:ResizeObservation", "kwargs": {"shape": [84, 84]}}]
    ),
    "vector": _vector(id="ale_py:ALE/Pong-v5", kwargs={"repeat_action_probability": 0.25}),
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
    "episodes-of-checkpoints": _episodes(_SWEEP, policy=MLP),
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

_DATASET = {"dataset": {"uri": "data/x"}}
_MAP = {"name": "easy"}
_KWARGS = "write envpool.numEnvs, batchSize and numThreads, env.maxEpisodeSteps and collection.seed instead"
_BOUNDS = "minReplicas 4 is greater than maxReplicas 2"

_RULES = [
    *(("spec.env.info[0].fill", f"{fill} of won does not fit {dtype}",
       manifest(env__info=[{**_WON, "dtype": dtype, "fill": fill}]))
      for dtype, fill in (("bool", 2), ("int64", 0.5), ("uint8", -1))),
    *(("spec.collection.episodeMetrics" + field, sentence, _metrics(info, {**_SUCCESS, **metric}))
      for info, metric, field, sentence in (
          ([{"key": "x"}], {}, "", 'to env.info, which has ["x"]'),
          (None, {}, "", "reads a key that env.info does not declare"),
          ([{**_WON, "shape": [2]}], {}, "", "success reads a key with a shape"),
          ([_WON], {"name": "return"}, "[0].name", "the name return is taken"))),
    *(("spec.collection.episodes", sentence, _episodes(episodes, **more))
      for episodes, more, sentence in (
          ({}, {}, "exactly one of count, seeds and resetOptions is required, found 0"),
          ({"count": 3, "seeds": [1]}, {}, "exactly one of count, seeds and resetOptions is required, found 2"),
          ({"resetOptions": [{"level": 1}]}, {}, "resetOptions need a gymnasium environment"),
          ({"count": 3, "perTask": False}, {}, "among env.variants, and there are none"),
          (_SWEEP, {"policy": MLP | {"initialWeights": "a"}}, _IN_PLACE),
          (_SWEEP, {"policy": {"random": {}}}, _IN_PLACE))),
    ("spec.collection.seed", "seed 2147483639 leaves no room for the episodes' own seeds",
     _episodes({"count": 10}, collection__seed=2**31 - 9)),
    ("spec.output", "collection.episodes needs a folder for its results", manifest(collection__episodes={"count": 3})),
    ("spec.output", "both missing", At({})),
    ("spec.env", "found 0", At({})),
    ("spec.env", "exactly one of envpool, gymnasium, vector, pettingzoo, openenv and jax is required, found 2",
     manifest(env__gymnasium={"id": "CartPole-v1", "numEnvs": 8})),
    ("spec.policy", "entrypoint and agents is required, found 0", At({})),
    ("spec.policy", "compile auto and dtype float32 need policy.entrypoint", manifest(policy__compile="auto")),
    *(("spec.policy.agents.red", sentence, _policies(red=policy, b=_B))
      for policy, sentence in (
          ({}, "write exactly one of random, entrypoint and model"),
          ({"random": {}, "model": "b"}, "write exactly one of random, entrypoint and model"),
          ({"random": {}, "version": 1}, "at most one of random, version and sample"),
          ({"model": "b", "version": 1, "sample": {}}, "at most one of random, version and sample"))),
    *(("spec.policy.agents", "model b is not a group with an entrypoint", _policies(red={"model": "b"}, **others))
      for others in ({}, {"b": {"model": "c"}, "c": _B})),
    ("spec.policy.agents", "agents need env.pettingzoo or env.envpool", gymnasium(policy={"agents": {"red": _B}})),
    ("spec.env.gymnasium", "found 0", gymnasium(id=None)),
    ("spec.env.gymnasium", "found 2; write id for a registered", gymnasium(entrypoint="a:b")),
    ("spec.env.recycle",
     "recycle replaces processes of single environments; use gymnasium or pettingzoo with vectorization: subprocess",
     gymnasium(vectorization="inline", env={"recycle": {"episodes": 100}})),
    *(("spec.env.variants", "variants are for envpool, gymnasium and pettingzoo",
       manifest(env={**block, "variants": [_MAP]}))
      for block in ({"jax": {"entrypoint": "a:b", "numEnvs": 8}}, {"vector": {"id": "CartPole-v1", "numEnvs": 8}})),
    ("spec.env.variants",
     "a variant has a taskId, but gymnasium.entrypoint names a factory; write kwargs, or use gymnasium.id",
     gymnasium(id=None, entrypoint="a:b", env={"variants": [_MAP, {"name": "hard", "taskId": "CartPole-v1"}]})),
    ("spec.env.variants", "variants step in lockstep, found batchSize 4; set batchSize: 0",
     manifest(env__envpool__batchSize=4, env__variants=[_MAP])),
    ("spec.env.vector", "a vector environment limits its own episodes; remove maxEpisodeSteps",
     manifest(env={"vector": {"id": "CartPole-v1", "numEnvs": 8}, "maxEpisodeSteps": 5})),
    ("spec.env.vector.kwargs", "kwargs cannot have num_envs: write vector.numEnvs instead",
     _vector(id="CartPole-v1", kwargs={"num_envs": 4})),
    ("spec.env.openenv", "found 0; write image for a server beside", _openenv()),
    *(("spec.env.envpool.kwargs", _KWARGS, At({name: 100}))
      for name in ("num_envs", "batch_size", "num_threads", "max_episode_steps", "seed", "env_seed")),
    *(("spec.env.envpool.batchSize", f"batchSize {size} does not divide numEnvs 8", At(size)) for size in (16, 3)),
    *(("spec.collection.framesPerBatch",
       f"framesPerBatch {frames} is not a multiple of numEnvs 8; write a multiple of it, for example {nearest}",
       At(frames)) for frames, nearest in ((100, 104), (4, 8))),
    *(("spec.collection.framesPerBatch", "framesPerBatch 64 is not a multiple of numEnvs 7", document)
      for document in (gymnasium(numEnvs=7), _vector(id="CartPole-v1", numEnvs=7))),
    *(("spec.collection", "multiStep, splitTrajectories and bfloat16 need", manifest(output=_DATASET, **asked))
      for asked in (
          {"collection__multiStep": {"steps": 3}}, {"collection__splitTrajectories": True},
          {"collection__bfloat16": ["logits"]})),
    ("spec.collection.normalize", "normalize is empty; write observation: {}, reward: {} or both", At({})),
    ("spec.collection.normalize.observation.keys", "keys contains a key twice", At(["pos", "arm", "pos"])),
    ("spec.collection.preemptiveThreshold", "preemptiveThreshold below 1 needs mode sync",
     manifest(collection__preemptiveThreshold=0.5)),
    ("spec.collection.preemptiveThreshold", "preemptiveThreshold 0 would not wait for any worker",
     manifest(collection__mode="sync", collection__preemptiveThreshold=0.0)),
    ("spec.collection.resetAtEachBatch", "resetAtEachBatch needs envpool.batchSize 0",
     manifest(env__envpool__batchSize=4, collection__resetAtEachBatch=True)),
    ("spec.elasticGroup", 'elasticGroup gpu is not a worker group; use one of ["cpu"]',
     groups(CPU, elasticGroup="gpu")),
    ("spec.elasticGroup",
     "spec.replicas sizes group act, which has role inference; name a group that collects in elasticGroup",
     groups({"name": "act", "role": "inference"}, {"name": "cpu", "replicas": 1}, policy=MLP)),
    *(("spec.workerGroups", sentence, document) for sentence, document in (
        ("replicas of the elastic group cpu must not be set, because spec.replicas 2 sizes it",
         groups({"name": "cpu", "replicas": 3}, replicas=2)),
        ("replicas is missing in group gpu", groups(CPU, {"name": "gpu"})),
        ("minReplicas and maxReplicas must not be set in group gpu, because cpu is the elastic group",
         groups(CPU, GPU | {"maxReplicas": 2})),
        ('all groups ["act"] have role inference and no group collects; add a group with role collect',
         groups({"name": "act", "role": "inference"}, policy=MLP)),
        ("random actions need no inference servers; remove the groups with role inference, or name a policy",
         groups(CPU, SERVERS)),
        ("all groups with role inference have 0 replicas, and workers cannot act without servers",
         groups(CPU, {**SERVERS, "replicas": 0}, policy=MLP)),
        ("an evaluation asks the policy for one row at a time, in the workers; remove the groups with role",
         groups(CPU, SERVERS, policy=MLP, collection__episodes={"count": 4}, output=_DATASET)),
        ("nothing says how many workers are needed; add output.queue: {} or remove autoscale",
         groups({"name": "cpu", "autoscale": {"maxReplicas": 2}}, output=_DATASET)))),
    *(("spec.replicas", f"replicas {replicas} is not from {low} to {high}, the minReplicas and maxReplicas of the",
       groups({"name": "cpu", bound: 4}, replicas=replicas))
      for bound, replicas, low, high in (("minReplicas", 3, 4, 9999), ("maxReplicas", 5, 0, 4))),
    ("spec.workerGroups[0].minReplicas", _BOUNDS,
     groups({"name": "cpu", "minReplicas": 4, "maxReplicas": 2}, replicas=4)),
    ("spec.workerGroups[0].autoscale.minReplicas", _BOUNDS,
     groups({"name": "cpu", "autoscale": {"minReplicas": 4, "maxReplicas": 2}})),
    ("spec.workerGroups[1].autoscale",
     "autoscale adds workers that step environments, and group gpu has role inference; remove autoscale",
     groups(CPU, {**SERVERS, "autoscale": {"maxReplicas": 4}}, policy=MLP)),
    ("spec.inference", 'inference is for groups with role inference, and no group of ["cpu"] has it',
     groups(CPU, policy=MLP, inference={"maxBatch": 64})),
]  # fmt: skip

_SCHEMA = [
    ("metadata.name", '"Pong" is not valid', manifest("Pong")),
    ("metadata.name", "beginning with a letter", manifest("1pong")),
    ("metadata.name", "must have at most 40 characters", manifest("a" * 41)),
    ("spec", "is missing", {key: value for key, value in manifest().items() if key != "spec"}),
    ("spec", "[] is not an object", manifest() | {"spec": []}),
    ("spec.policy", "is missing", At(ABSENT)),
    ("spec.policy", "is missing", At(None)),
    ("spec.env.info", "the key won occurs twice in info", At([_WON, _WON])),
    ("spec.env.info[0].key", '"a/b" is not valid; write letters, digits', manifest(env__info=[{"key": "a/b"}])),
    ("spec.collection.episodeMetrics", "the name success occurs twice", _metrics([_WON], _SUCCESS, _SUCCESS)),
    ("spec.collection.episodes.seeds", "seed 2 is listed more than once", _episodes({"seeds": [1, 2, 2]})),
    *(("spec.head.tls", f"exactly one of secretName and certManager is required, found {found}", At(tls))
      for found, tls in (
          (0, {}), (2, {"secretName": "a", "certManager": {"issuerRef": {"name": "ca"}}}))),
    ("spec.env.pettingzoo.groupMap", "", _agents(id="a/b_v0", groupMap={})),
    ("spec.env.openenv.url", "is not valid; write an address such as", _openenv(url="127.0.0.1:8000")),
    ("spec.env.envpool.taskId", "must have at least 1 character", At("")),
    ("spec.env.envpool.numEnvs", "0 is less than 1; write a number from 1 to 65536", At(0)),
    ("spec.env.envpool.kwargs", "[] is not an object", At([])),
    ("spec.env.variants", "the name easy occurs twice in variants; give each variant a name of its own",
     At([_MAP, {"name": "hard"}, _MAP])),
    ("spec.collection.preemptiveThreshold", "1.5 is greater than 1",
     manifest(collection__mode="sync", collection__preemptiveThreshold=1.5)),
    ("spec.collection.totalFrames", "is greater than", At(2**63)),
    ("spec.collection.framesPerBatch", "64.5 is not an integer", At(64.5)),
    ("spec.collection.framesPerBatch", '"64" is not an integer', At("64")),
    ("spec.replicas", "true is not an integer", At(True)),
    ("spec.replicas", "-1 is less than 0", At(-1)),
    ("spec.image", "false is not a string; quote it", At(False)),
    ("spec.suspend", '"no" is not true or false', At("no")),
    ("spec.collection.mode", "\"asynch\" must be 'sync' or 'async'", At("asynch")),
    ("spec.policy.entrypoint", "write package.module:attribute", manifest(policy={"entrypoint": "my_pkg.policies"})),
    ("spec.workerGroups", "must have at least 1 item", groups()),
    ("spec.workerGroups", "must have at most 8 items",
     groups({"name": "a"}, *({"name": f"g{index}", "replicas": 1} for index in range(8)))),
    ("spec.workerGroups", "the name cpu occurs twice in workerGroups", groups(CPU, {"name": "cpu"})),
    ("spec.workerGroups[0]", "null is not an object", manifest(workerGroups=[None])),
    *(("spec.runPolicy.maxUnavailable",
       f"{text}: write a whole number from 1, or a percentage from 1% to 100%", At(value))
      for text, value in (("0", 0), ('"5"', "5"))),
    ("spec.managedBy", '"kueue" is not valid; write a domain, a slash and a name, such as example.com/controller',
     At("kueue")),
]  # fmt: skip

_STRICT = [
    ("spec.policy.agents.red.versions", "did you mean version", _policies(red={**_B, "versions": 1})),
    ("spec.env.envpool.num_envs", "unknown field; did you mean numEnvs?", At(8)),
    ("spec.output.queue.zzz", "unknown field; valid fields: capacityBatches, onFull", At(1)),
    ("spec.policy.random.seed", "unknown field; no fields are allowed here, write {}", At(1)),
    ("specs", "unknown field; did you mean spec?", manifest() | {"specs": {}}),
]  # fmt: skip

INVALID = [
    Case(path, sentence, document.beside(path) if isinstance(document, At) else document, by=by)
    for by, rows in (("rule", _RULES), ("schema", _SCHEMA), ("strict", _STRICT))
    for path, sentence, document in rows
]


class Update(NamedTuple):
    """A valid manifest that becomes another valid one, and the field that must not change (empty: all may)."""

    old: Document
    new: Document
    path: str = ""


_ACTOR = {"entrypoint": "a:b", "kwargs": {"hidden": [64]}}
UPDATES: dict[str, Update] = {
    "scaled": Update(manifest(), manifest(replicas=3)),
    "more-frames": Update(manifest(), manifest(collection__totalFrames=128)),
    "other-exploration": Update(manifest(policy=_ACTOR), manifest(policy=_ACTOR | {"explorationType": "mode"})),
    "compiled": Update(manifest(policy=_ACTOR), manifest(policy=_ACTOR | {"compile": "auto"})),
    "other-task": Update(manifest(), manifest(env__envpool__taskId="Breakout-v5"), "spec.env"),
    "other-env-kwargs": Update(manifest(), manifest(env__envpool__kwargs={"a": {"b": 1}}), "spec.env"),
    "other-kind-of-env": Update(manifest(), gymnasium(), "spec.env"),
    "other-entrypoint": Update(manifest(policy=_ACTOR), manifest(policy=_ACTOR | {"entrypoint": "a:c"}), "spec.policy"),
    "other-policy-kwargs": Update(
        manifest(policy=_ACTOR), manifest(policy=_ACTOR | {"kwargs": {"hidden": [32]}}), "spec.policy.kwargs"
    ),
    "random-to-entrypoint": Update(manifest(), manifest(policy={"entrypoint": "a:b"}), "spec.policy"),
    "other-agents": Update(
        manifest(policy={"agents": {"red": _ACTOR}}),
        manifest(policy={"agents": {"red": _ACTOR | {"version": 3}}}),
        "spec.policy",
    ),
    "another-controller": Update(manifest(), manifest(managedBy="example.com/controller"), "spec.managedBy"),
}


FINITE = st.floats(allow_nan=False, allow_infinity=False)  # JSON has no other
SCALARS = st.none() | st.booleans() | st.integers(-(2**64), 2**64) | FINITE | st.text(max_size=12)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [leaf for key, item in items for leaf in leaves(item, (*path, key))]


@st.composite
def changed_manifests(draw: st.DrawFn) -> dict[str, Any]:
    """A manifest of the table, written out with all defaults, with one value of its spec replaced."""
    document = parse_job(VALID[draw(st.sampled_from(sorted(VALID)))]).to_document()
    path = draw(st.sampled_from([path for path in leaves(document["spec"]) if "kwargs" not in path[:-1]]))
    node = document["spec"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = draw(SCALARS | st.just([]) | st.just({}))
    return document
