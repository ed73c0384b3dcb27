"""Generated manifests for property tests: a valid one with one value changed."""

from typing import Any

from hypothesis import strategies as st

from cormorant_contract.parsing import parse_job
from manifest_cases import VALID

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
