"""Entrypoints of manifests, looked up in source files without running them."""

from pathlib import Path
from typing import Any

import pytest

from cormorant_contract.parsing import parse_job
from cormorant_manifest.entrypoints import missing_entrypoints
from manifest_making import manifest

SOURCE = """
raise RuntimeError("never run")
import torch as th
from json import loads
if True:
    def guarded(observation_space, action_space): ...
alias = loads
def make(observation_space, action_space, hidden=64, *, activation="tanh"): ...
def needs(observation_space, action_space, hidden): ...
def plain(observation_space, action_space): ...
def anything(*args, **kwargs): ...
def one(observation_space): ...
class Policy:
    def __init__(self, observation_space, action_space, width=1): ...
    @staticmethod
    def build(observation_space, action_space): ...
"""


def trouble(folder: Path, entrypoint: str, **kwargs: Any) -> str:
    job = parse_job(manifest(policy={"entrypoint": entrypoint, "kwargs": kwargs}))
    return "\n".join(problem.message for problem in missing_entrypoints(job, folder=folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_policies.py").write_text(SOURCE)
    (tmp_path / "open.py").write_text("from os import *\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("raise RuntimeError('never run')\n")
    (tmp_path / "pkg" / "nets.py").write_text("def make(o, a): ...\n")
    (tmp_path / "front.py").write_text("from pkg.nets import make as build\nfrom nowhere import lost\n")
    return tmp_path


@pytest.mark.parametrize(
    ("entrypoint", "kwargs"),
    [
        ("my_policies:make", {"hidden": 3, "activation": "relu"}),
        ("my_policies:guarded", {}),
        ("my_policies:alias", {"whatever": 1}),
        ("my_policies:anything", {"whatever": 1}),
        ("my_policies:Policy", {"width": 2}),
        ("my_policies:Policy.build", {}),
        ("open:anything", {}),
        ("broken:anything", {}),
        ("pkg.nets:make", {}),
        ("cormorant.policies:mlp", {}),
        ("math:sqrt", {}),
        ("front:build", {}),
        ("front:lost", {"x": 1}),
    ],
)
def test_what_exists_or_cannot_be_known_is_no_problem(folder: Path, entrypoint: str, kwargs: dict[str, Any]) -> None:
    assert trouble(folder, entrypoint, **kwargs) == ""


@pytest.mark.parametrize(
    ("entrypoint", "kwargs", "sentence"),
    [
        ("my_polices:make", {}, "there is no module my_polices; did you mean my_policies?"),
        ("nothing_alike:make", {}, "there is no module nothing_alike; put the policy's module beside"),
        ("my_policy:make", {}, "there is no module my_policy; did you mean my_policies?"),  # and not mypy
        ("pkg.net:make", {}, "there is no module pkg.net; did you mean pkg.nets?"),
        ("my_policies:mak", {}, "my_policies has no mak; did you mean make?"),
        ("cormorant.policies:mpl", {}, "has no mpl; did you mean mlp"),
        ("my_policies:make", {"hiden": 3}, "has no argument hiden; did you mean hidden?"),
        ("my_policies:make", {"zzz": 3}, "has no argument zzz; it has hidden, activation"),
        ("my_policies:plain", {"hidden": 3}, "has no argument hidden; it takes none"),
        ("my_policies:needs", {}, "needs the argument hidden"),
        ("my_policies:Policy", {"witdh": 2}, "has no argument witdh; did you mean width?"),
        ("front:build", {"hidden": 3}, "front:build has no argument hidden; it takes none"),
        ("cormorant.policies:mlp", {"hiden": [8]}, "has no argument hiden; did you mean hidden?"),
        ("my_policies:one", {}, "takes 1 of the two arguments"),
    ],
)
def test_typos_are_found_with_near_matches(
    folder: Path, entrypoint: str, kwargs: dict[str, Any], sentence: str
) -> None:
    assert sentence in trouble(folder, entrypoint, **kwargs)


@pytest.mark.parametrize("kind", ["gymnasium", "vector"])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("CartPole-v1", ""),
        ("my_package:Own-v0", ""),  # its package registers it
        ("CartPol-v1", "CartPol-v1 is not registered: Environment `CartPol` doesn't exist. Did you mean: `CartPole`?"),
    ],
)
def test_unknown_id_is_found_without_an_environment(kind: str, name: str, sentence: str) -> None:
    problems = missing_entrypoints(parse_job(manifest(env={kind: {"id": name, "numEnvs": 8}})))
    assert [problem.path for problem in problems] == ([f"spec.env.{kind}.id"] if sentence else [])
    assert all(sentence in problem.message for problem in problems)
