"""Manifests that nobody wrote by hand, for property tests: valid ones, and good ones with one value changed."""

from typing import Any

from hypothesis import strategies as st

from cormorant_contract.parsing import parse_job
from manifest_cases import VALID
from manifest_making import manifest

LABELS = st.from_regex("[a-z0-9]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
ENTRYPOINTS = st.from_regex("[a-z_]{1,5}([.][a-z_]{1,5}){0,2}:[a-z_]{1,8}", fullmatch=True)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=3)


@st.composite
def environments(draw: st.DrawFn, num_envs: int) -> dict[str, Any]:
    if draw(st.booleans()):
        divisors = [size for size in range(num_envs + 1) if size == 0 or num_envs % size == 0]
        pool = {"taskId": draw(st.text(min_size=1, max_size=20)), "numEnvs": num_envs, "kwargs": draw(OBJECTS)}
        return {"envpool": pool | {"batchSize": draw(st.sampled_from(divisors))}}
    wrappers = st.fixed_dictionaries({"entrypoint": ENTRYPOINTS}, optional={"kwargs": OBJECTS})
    factory = (
        {"entrypoint": draw(ENTRYPOINTS)} if draw(st.booleans()) else {"id": draw(st.text(min_size=1, max_size=20))}
    )
    return {"gymnasium": factory | {"numEnvs": num_envs, "wrappers": draw(st.lists(wrappers, max_size=2))}}


@st.composite
def worker_groups(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(LABELS, min_size=1, max_size=4, unique=True))  # rules on groups take milliseconds each
    elastic, replicas = draw(st.sampled_from(names)), draw(st.integers(0, 9999))
    groups: list[dict[str, Any]] = []
    for name in names:
        device = draw(st.sampled_from(["cpu", "gpu"]))
        size = (
            {"minReplicas": draw(st.integers(0, replicas))}
            if name == elastic
            else {"replicas": draw(st.integers(0, 9999))}
        )
        groups.append({"name": name, "device": device, "template": draw(OBJECTS)} | size)
    return {"workerGroups": groups, "elasticGroup": elastic, "replicas": replicas}


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    num_envs = draw(st.integers(1, 64))
    policy = {"random": {}} if draw(st.booleans()) else {"entrypoint": draw(ENTRYPOINTS), "kwargs": draw(OBJECTS)}
    collection = {"framesPerBatch": num_envs * draw(st.integers(1, 1000)), "seed": draw(st.integers(0, 2**53 - 1))}
    return manifest(
        draw(st.from_regex("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)),
        env=draw(environments(num_envs)),
        policy=policy,
        collection=collection,
        **draw(worker_groups()),
    )


SCALARS = st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False) | st.text(max_size=12)


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
