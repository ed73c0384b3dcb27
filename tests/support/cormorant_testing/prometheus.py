"""A real Prometheus, as a process of this machine; and what an expression asks it for: metrics, and labels of them."""

import json
import math
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from cormorant_contract.metrics import SCRAPE_LABELS
from cormorant_testing.needs import lacks
from cormorant_testing.scripts import Server, until, unused_port


class Prometheus(Server):
    """One Prometheus that scrapes every 2 s; skips the test where there is none."""

    def __init__(self, folder: Path, scraped: Sequence[Mapping[str, Any]], *, rules: Path | None = None) -> None:
        """Start it.

        Args:
            folder: for its data.
            scraped: scrape configurations.
            rules: a rule file.
        """
        if shutil.which("prometheus") is None:
            lacks("prometheus", "no prometheus on the PATH: nothing is scraped (Debian: apt-get install prometheus)")
        config = {
            "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
            "scrape_configs": list(scraped),
            "rule_files": [str(rules)] if rules is not None else [],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{unused_port()}"
        self._url = f"http://{address}"
        command = [
            *("prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
            *(f"--web.listen-address={address}", "--query.lookback-delta=30s"),
        ]
        super().__init__(command, f"{self._url}/-/ready")

    def query(self, expr: str, *, at: float | None = None) -> dict[tuple[tuple[str, str], ...], float]:
        asked = urllib.parse.urlencode({"query": expr} | ({"time": str(at)} if at is not None else {}))
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/query?{asked}", timeout=30) as response:
                data = json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expr}: {error.read().decode()}") from error
        if data["resultType"] == "scalar":
            return {(): float(data["result"][1])}
        return {tuple(sorted(row["metric"].items())): float(row["value"][1]) for row in data["result"]}

    def numbers(self, expr: str) -> list[float]:
        return [value for value in self.query(expr).values() if not math.isnan(value)]

    def wait_for_numbers(self, expr: str, *, seconds: float = 60) -> list[float]:
        until(lambda: self.numbers(expr), seconds=seconds, what=f"{expr} gives nothing")
        return self.numbers(expr)


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
