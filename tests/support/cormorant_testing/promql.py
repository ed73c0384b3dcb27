"""What an expression asks Prometheus for: metrics, and the labels that it names of them."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import promql_parser

from cormorant_contract.metrics import SCRAPE_LABELS


@dataclass(frozen=True, slots=True)
class Selected:
    name: str
    labels: frozenset[str]


def substitute(expr: str, **variables: str) -> str:
    """An expression of a dashboard as Prometheus gets it."""
    for name, value in {"__rate_interval": "1m", **variables}.items():
        expr = expr.replace(f"${name}", value)
    return expr


def selectors(expr: str) -> list[Selected]:
    return [
        Selected(node.name, frozenset(matcher.name for matcher in node.matchers.matchers))
        for node in _walk(promql_parser.parse(expr))
        if isinstance(node, promql_parser.VectorSelector)
    ]


def grouping(expr: str) -> frozenset[str]:
    """Every label that is grouped or matched by."""
    found: set[str] = set()
    for node in _walk(promql_parser.parse(expr)):
        modifier = getattr(node, "modifier", None)
        if isinstance(node, promql_parser.AggregateExpr) and modifier is not None:
            found |= set(modifier.labels)
    for clause in re.findall(r"\b(?:on|ignoring|group_left|group_right)\s*\(([^)]*)\)", expr):
        found |= {label.strip() for label in clause.split(",") if label.strip()}
    return frozenset(found)


def check_labels(expr: str, known: Mapping[str, Collection[str]]) -> None:
    """Everything that an expression names exists: labels by metric, beside those of scraping."""
    labels: set[str] = {*SCRAPE_LABELS, "le"}
    for selected in selectors(expr):
        assert selected.name in known, selected.name
        assert selected.labels <= {*known[selected.name], *SCRAPE_LABELS}
        labels |= set(known[selected.name])
    assert grouping(expr) <= labels


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for part in ("lhs", "rhs", "expr", "vector_selector", "args", "param"):
        below = getattr(node, part, None)
        for child in below if isinstance(below, (list, tuple)) else [below]:
            if child is not None and type(child).__module__.startswith("promql_parser"):
                yield from _walk(child)
