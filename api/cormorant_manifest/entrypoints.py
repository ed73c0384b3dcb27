"""Whether the entrypoints of a manifest exist, read from source files without running them.

Called by `cormorant validate --imports`, and before workers start: a typo is answered in a blink, with near matches.
What a reader of the source cannot know (star imports, `__getattr__`, compiled modules) counts as found; workers will
tell.
"""

import ast
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from cormorant_contract.env import Variant
from cormorant_contract.errors import Problem, did_you_mean
from cormorant_contract.job import CollectorJob
from cormorant_contract.policy import AgentPolicy, Policy

Location = tuple[str | int, ...]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_UNKNOWN = "*"
"""In place of the names of a module that cannot be read from its source."""


def missing_entrypoints(job: CollectorJob, *, folder: Path | None = None) -> list[Problem]:
    """Entrypoints of a manifest that no source file defines. `folder`: the manifest's folder, searched first."""
    path = ([str(folder)] if folder is not None else []) + sys.path
    policy, env, block = job.spec.policy, job.spec.env, job.spec.env.block
    of_env: Location = ("spec", "env", block.kind)
    wrong: list[tuple[Location, str]] = []
    if block.registry == "gymnasium":
        wrong.append(((*of_env, "id"), _unregistered(getattr(block, block.registered))))
        wrong += [(("spec", "env", "variants"), _unregistered(variant.task_id)) for variant in env.variants or ()]
    policies: dict[Location, Policy | AgentPolicy] = {(): policy}
    policies |= {("agents", group): one for group, one in (policy.agents or {}).items()}
    for location, one in policies.items():
        sentence = _trouble(one.entrypoint, one.kwargs, path, num_positional=2)  # the spaces
        wrong.append((("spec", "policy", *location, "entrypoint"), sentence))
    own = {"num_envs": block.num_envs} if block.num_envs_argument else {}
    for variant in env.variants or (Variant(name="all"),):
        kwargs = {**own, **block.kwargs, **variant.kwargs}
        wrong.append(((*of_env, "entrypoint"), _trouble(getattr(block, "entrypoint", None), kwargs, path)))
    return [
        Problem(message=sentence, name=job.metadata.name, location=location) for location, sentence in wrong if sentence
    ]


def _unregistered(name: str | None) -> str:
    if not name or ":" in name:  # a package that is named before the id registers it
        return ""
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


def _trouble(entrypoint: str | None, kwargs: Mapping[str, Any], path: Sequence[str], *, num_positional: int = 0) -> str:
    """The problem of an entrypoint, as a sentence; empty if there is none, or it cannot be known."""
    if entrypoint is None:
        return ""
    module, _, attribute = entrypoint.partition(":")
    names = _names(module, path)
    if isinstance(names, str):
        return f"{entrypoint}: {names}"
    first = attribute.partition(".")[0]
    if first not in names:
        return "" if _UNKNOWN in names else f"{entrypoint}: {module} has no {first}{did_you_mean(first, sorted(names))}"
    node = names.get(attribute)
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == attribute)
        there = _names(node.module, path)
        node = None if isinstance(there, str) else there.get(original)
    if (known := _arguments(node, num_positional)) is None or kwargs.keys() <= set(known):
        return ""
    name = next(name for name in kwargs if name not in known)
    otherwise = f"; it has {', '.join(known)}" if known else "; it takes none"
    return f"{entrypoint} has no argument {name}{did_you_mean(name, known, otherwise=otherwise)}"


def _names(module: str, path: Sequence[str]) -> dict[str, ast.AST | None] | str:
    """Names that a module has at its top level, also below `if` and `try`, with what defines them; None: several do,
    or the source does not tell. A sentence if there is no such module.
    """
    spec = _find(module, path)
    if isinstance(spec, str):
        return spec
    try:
        nodes: list[ast.AST] = [ast.parse(Path(spec.origin or "").read_bytes())]
    except (OSError, SyntaxError, ValueError):  # also a compiled module
        return {_UNKNOWN: None}
    names: dict[str, ast.AST | None] = {}
    while nodes:
        node = nodes.pop()
        defined = []
        if isinstance(node, Definition):
            defined = [_UNKNOWN if node.name == "__getattr__" else node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined = [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined = [node.id]
        else:
            nodes.extend(ast.iter_child_nodes(node))
            # globals()["name"] = ... and setattr(module, ...) make names that are not written down.
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("globals", "setattr", "exec"):
                defined = [_UNKNOWN]
        names |= {name: None if name in names else node for name in defined}
    return names


def _find(module: str, path: Sequence[str]) -> ModuleSpec | str:
    """A module's spec, found as an import would find it, without importing its packages; or that there is none."""
    parent, spec, search = "", ModuleSpec(module, None), list(path)
    for part in module.split("."):
        name = f"{parent}{part}"
        found = PathFinder.find_spec(name, search)
        if found is None:
            if not parent and (name in sys.builtin_module_names or name in sys.modules):
                return spec
            siblings = [f"{parent}{sibling.name}" for sibling in pkgutil.iter_modules(search)]
            remedy = "; put it beside the manifest or on PYTHONPATH, or install it"
            # Hundreds of packages are installed: one of them looks a little like any name.
            near = did_you_mean(name, siblings, cutoff=0.6 if parent else 0.8, otherwise=remedy)
            return f"there is no module {name}{near}"
        parent, spec, search = f"{name}.", found, list(found.submodule_search_locations or [])
    return spec


def _arguments(node: ast.AST | None, num_positional: int) -> list[str] | None:
    """Arguments of a function or class beside the positional ones; None if it takes any, or that cannot be known."""
    if not isinstance(node, Definition) or node.decorator_list:
        return None
    if isinstance(node, ast.ClassDef):
        num_positional += 1
        node = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if node is None or node.args.kwarg is not None:
        return None
    given = node.args
    positional = [*given.posonlyargs, *given.args][num_positional:]
    return [argument.arg for argument in (*positional, *given.kwonlyargs)]
