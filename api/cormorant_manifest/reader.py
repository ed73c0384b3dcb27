"""Manifests in YAML, from a file or standard input, as CollectorJobs with the lines that problems stand on.

YAML is read as kubectl reads it (go-yaml): no timestamps, no base 60, `1e3` is a number; a key may stand once.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from cormorant_contract.errors import ManifestError, Problem
from cormorant_contract.job import CollectorJob
from cormorant_contract.parsing import parse_job

STDIN = "-"
MAX_BYTES = 1024 * 1024
"""More than the API server stores of one object."""

MAX_NODES = 100_000
"""Values of one document once its aliases are written out."""


def load_jobs(path: str | Path) -> list[CollectorJob]:
    """Read every CollectorJob of a file; `-` is standard input. ManifestError has all problems of all documents."""
    source = "standard input" if str(path) == STDIN else str(path)
    try:
        if str(path) == STDIN:
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refusal(source, f"cannot be read: {reason}; check the path") from error
    if len(data) > MAX_BYTES:
        raise _refusal(source, f"has more than {MAX_BYTES} bytes, which no manifest has; check the path")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refusal(source, f"is not UTF-8 text: {error.reason} at position {error.start}") from error
    return parse_jobs(text, source)


def parse_jobs(text: str, source: str = "") -> list[CollectorJob]:
    """Read every CollectorJob of a YAML text; empty documents between `---` count for nothing."""
    jobs: list[CollectorJob] = []
    problems: list[Problem] = []
    for position, root in enumerate(_documents(text, source), start=1):
        if root is None:
            continue
        try:
            jobs.append(_job(root, source, position))
        except ManifestError as error:
            placed = [
                replace(problem, line=problem.line or _line(root, problem.location)) for problem in error.problems
            ]
            problems += sorted(placed, key=lambda problem: problem.line)
    if problems:
        raise ManifestError(problems)
    if not jobs:
        raise _refusal(source, "contains no document; a manifest begins with apiVersion and kind: CollectorJob")
    return jobs


def _documents(text: str, source: str) -> list[yaml.Node | None]:
    try:
        loader = _Loader(text)
        try:
            roots: list[yaml.Node | None] = []
            while loader.check_node():
                root = loader.get_node()
                is_empty = isinstance(root, yaml.ScalarNode) and root.tag == "tag:yaml.org,2002:null"
                roots.append(None if is_empty else root)
            return roots
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        what = " ".join(part for part in (getattr(error, "context", ""), getattr(error, "problem", "")) if part)
        mark = getattr(error, "problem_mark", None)
        sentence = f"is not valid YAML: {what or ' '.join(str(error).split())}; check indentation, colons and quotes"
        raise _refusal(source, sentence, line=mark.line + 1 if mark else 0) from error
    except RecursionError:
        raise _refusal(source, "is nested too deeply for a manifest") from None


def _job(root: yaml.Node, source: str, position: int) -> CollectorJob:
    """Construct one document and parse it; refuses what a reader of YAML could misunderstand."""
    if _size(root, {}) > MAX_NODES:
        problems = [Problem(message=f"its aliases expand to more than {MAX_NODES} values; write it without aliases")]
    else:
        problems = list(_duplicates(root, ()))
    if problems:
        raise ManifestError([replace(problem, source=source, document=position) for problem in problems])
    loader = _Loader("")
    try:
        document = loader.construct_document(root)
    except (yaml.constructor.ConstructorError, ValueError, LookupError, AttributeError, TypeError) as error:
        # The latter are what PyYAML's constructors raise on `!!float x` and its like; nothing else of ours runs there.
        mark, what = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        sentence = f"is not valid YAML: {what}; write plain keys and values, without tags"
        raise _refusal(source, sentence, line=mark.line + 1 if mark else 0, document=position) from error
    finally:
        loader.dispose()
    return parse_job(document, source, position=position)


def _refusal(source: str, sentence: str, *, line: int = 0, document: int = 0) -> ManifestError:
    return ManifestError([Problem(message=sentence, source=source, line=line, document=document)])


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Nodes once aliases are written out; too many for an alias that contains itself."""
    key = id(node)
    if key not in sizes:
        sizes[key] = MAX_NODES + 1  # what a node counts for inside itself
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        sizes[key] = 1 + sum(_size(part, sizes) for part in (() if isinstance(parts, str) else parts))
    return sizes[key]


def _duplicates(node: yaml.Node, location: tuple[str | int, ...]) -> Iterator[Problem]:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _duplicates(item, (*location, index))
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            here = (*location, str(key.value) if isinstance(key, yaml.ScalarNode) else "?")
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in first:
                yield Problem(message=f"is set twice, on lines {first[key.value]} and {line}; keep one", location=here)
            elif isinstance(key, yaml.ScalarNode):
                first[key.value] = line
            yield from _duplicates(value, here)


def _line(root: yaml.Node, location: Sequence[str | int]) -> int:
    """The line of a field, or of the nearest thing above it that exists."""
    line: int = root.start_mark.line
    node = root
    for part in location:
        if isinstance(part, int) and isinstance(node, yaml.SequenceNode) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
        elif isinstance(node, yaml.MappingNode):
            pairs = [(key, value) for key, value in node.value if key.value == part]
            if not pairs:
                break
            key, node = pairs[-1]
            line = key.start_mark.line
        else:
            break
    return line + 1


class _Loader(yaml.SafeLoader):
    """YAML's scalars as go-yaml reads them."""

    # A copy without timestamps and numbers: the class attribute is shared with every other user of PyYAML.
    yaml_implicit_resolvers = {  # noqa: RUF012 -- PyYAML's own declaration
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag.rpartition(":")[2] not in ("timestamp", "int", "float", "value")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


for _tag, _pattern in (
    ("int", r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list("-+.0123456789"))
