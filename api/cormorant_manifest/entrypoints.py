"""Whether the entrypoints of a manifest exist, read from source files without running them.

Called by `cormorant validate --imports`, and before workers start: a typo is answered in a blink, with near matches.
What a reader of the source cannot know (star imports, `__getattr__`, compiled modules) counts as found; workers will
tell.
"""

import ast
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from cormorant_contract.env import Variant
from cormorant_contract.errors import Problem, did_you_mean
from cormorant_contract.job import CollectorJob

Location = tuple[str | int, ...]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrypoint:
    """One `package.module:attribute` of a manifest."""

    path: str
    kwargs: Mapping[str, Any]
    num_positional: int
    """Arguments that are passed by position."""
    what: str
    location: Location


def missing_entrypoints(job: CollectorJob, *, folder: Path | None = None) -> list[Problem]:
    """Entrypoints of a manifest that no source file defines. `folder`: the manifest's folder, searched first."""
    path = ([str(folder)] if folder is not None else []) + sys.path
    env, block = job.spec.env, job.spec.env.block
    ids: list[tuple[Location, str | None]] = []
    if block.registry == "gymnasium":
        ids = [(("spec", "env", block.kind, "id"), getattr(block, block.registered))]
        ids += [(("spec", "env", "variants"), variant.task_id) for variant in env.variants or ()]
    return [
        Problem(message=sentence, name=job.metadata.name, location=location)
        for location, name in ids
        # A package that is named before the id registers it.
        if name and ":" not in name and (sentence := _unregistered(name))
    ] + [
        Problem(message=sentence, name=job.metadata.name, location=entry.location)
        for entry in _entrypoints(job)
        if (sentence := _trouble(entry, path))
    ]


def _unregistered(name: str) -> str:
    try:
        import gymnasium
    except ImportError:
        return ""  # a laptop that only validates
    try:
        gymnasium.spec(name)
    except gymnasium.error.UnregisteredEnv as error:
        return (
            f"{name} is not registered: {error} If a package registers it on import, write that package before the id, "
            'as in "ale_py:ALE/Pong-v5"'
        )
    return ""


def _entrypoints(job: CollectorJob) -> Iterator[Entrypoint]:
    policy, block = job.spec.policy, job.spec.env.block
    named: list[tuple[Location, Any]] = [((), policy)]
    named += [(("agents", group), one) for group, one in (policy.agents or {}).items()]
    for location, one in named:
        if one.entrypoint is not None:
            yield Entrypoint(
                path=one.entrypoint, kwargs=one.kwargs, num_positional=2, what="policy",
                location=("spec", "policy", *location, "entrypoint"),
            )  # fmt: skip
    if entrypoint := getattr(block, "entrypoint", None):
        own = {"num_envs": block.num_envs} if block.num_envs_argument else {}
        for variant in job.spec.env.variants or (Variant(name="all"),):
            yield Entrypoint(
                path=entrypoint, kwargs={**own, **block.kwargs, **variant.kwargs}, num_positional=0,
                what="environment", location=("spec", "env", block.kind, "entrypoint"),
            )  # fmt: skip


def _trouble(entry: Entrypoint, path: Sequence[str]) -> str:
    """The problem of an entrypoint, as a sentence; empty if there is none, or it cannot be known."""
    module, _, attribute = entry.path.partition(":")
    try:
        spec = _find(module, path)
    except _NoModule as missing:
        # Hundreds of packages are installed: one of them looks a little like any name.
        cutoff = 0.6 if missing.parent else 0.8
        siblings = [f"{missing.parent}{name}" for name in missing.siblings]
        name = f"{missing.parent}{missing.name}"
        remedy = f"; put the {entry.what}'s module beside the manifest or on PYTHONPATH, or install it"
        return f"{entry.path}: there is no module {name}{did_you_mean(name, siblings, cutoff=cutoff, otherwise=remedy)}"
    tree = _parsed(spec)
    if tree is None:
        return ""
    first = attribute.partition(".")[0]
    names = _names(tree)
    if first not in names:
        return "" if "*" in names else f"{entry.path}: {module} has no {first}{did_you_mean(first, sorted(names))}"
    definition = _definition(tree, attribute, path)
    return _call_trouble(entry, definition) if definition is not None else ""


def _definition(tree: ast.Module, name: str, path: Sequence[str], *, hops: int = 3) -> Definition | None:
    """The definition of a name, followed through `from package.module import name`; None where it cannot be read."""
    for node in (inner for outer in tree.body for inner in (outer.body if isinstance(outer, ast.With) else [outer])):
        if isinstance(node, Definition) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and not node.level and hops:
            original = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), "")
            if original:
                try:
                    home = _parsed(_find(node.module, path))
                except _NoModule:
                    return None
                return _definition(home, original, path, hops=hops - 1) if home is not None else None
    return None


class _NoModule(Exception):
    def __init__(self, parent: str, name: str, siblings: Sequence[str]) -> None:
        self.parent, self.name, self.siblings = parent, name, siblings


def _find(module: str, path: Sequence[str]) -> ModuleSpec:
    """A module's spec, found as an import would find it, without importing its packages. _NoModule if there is none."""
    parent, spec, search = "", None, list(path)
    for name in module.split("."):
        spec = PathFinder.find_spec(f"{parent}{name}", search)
        if spec is None:
            if not parent and (name in sys.builtin_module_names or name in sys.modules):
                return ModuleSpec(module, None)
            raise _NoModule(parent, name, [found.name for found in pkgutil.iter_modules(search)])
        parent, search = f"{parent}{name}.", list(spec.submodule_search_locations or [])
    assert spec is not None
    return spec


def _parsed(spec: ModuleSpec) -> ast.Module | None:
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _names(tree: ast.Module) -> set[str]:
    """Names that a module has at its top level, also below `if` and `try`; "*" where some cannot be known."""
    names: set[str] = set()
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, Definition):
            names.add("*" if node.name == "__getattr__" else node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            nodes.extend(ast.iter_child_nodes(node))
            # globals()["name"] = ... and setattr(module, ...) make names that are not written down.
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("globals", "setattr", "exec"):
                names.add("*")
    return names


def _call_trouble(entry: Entrypoint, definition: Definition) -> str:
    if definition.decorator_list:
        return ""
    skipped = 0
    if isinstance(definition, ast.ClassDef):
        makers = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        if not makers:
            return ""
        definition, skipped = makers[0], 1
    given = definition.args
    positional = [argument.arg for argument in (*given.posonlyargs, *given.args)][skipped:]
    known = positional[entry.num_positional :] + [argument.arg for argument in given.kwonlyargs]
    if given.kwarg is None:
        for name in entry.kwargs:
            if name not in known:
                hint = did_you_mean(
                    name, known, otherwise=f"; it has {', '.join(known)}" if known else "; it takes none"
                )
                return f"{entry.path} has no argument {name}{hint}"
    return ""
