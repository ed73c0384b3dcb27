"""`cormorant validate`: one sentence an error, a line number each, and never a traceback; entrypoints, which are looked
up in source files without running them.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cormorant_cli.__main__ import run
from cormorant_cli.commands.validate import judge
from cormorant_contract.errors import ManifestError
from cormorant_contract.parsing import parse_job
from cormorant_manifest.entrypoints import missing_entrypoints
from cormorant_manifest.reader import MAX_BYTES, parse_jobs
from manifest_cases import VALID
from manifest_making import manifest

GOOD = yaml.safe_dump(manifest())
HEAD = "apiVersion: cormorant.dev/v1alpha1\nkind: CollectorJob\nmetadata: {name: pong}\n"
SPEC = (
    "spec:\n"
    "  env: {envpool: {taskId: Pong-v5, numEnvs: 8}}\n"
    "  policy: {random: {}}\n"
    "  collection: {framesPerBatch: 64}\n"
)
ALIAS_BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))


def job_with(field: str) -> str:
    return f"{HEAD}{SPEC}  {field}\n"


@pytest.fixture
def validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Write job.yaml, validate it, return exit code and the lines of stderr."""
    monkeypatch.chdir(tmp_path)

    def validate(content: str | bytes) -> tuple[int, list[str]]:
        Path("job.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
        code = run(["validate", "job.yaml"])
        return code, capsys.readouterr().err.splitlines()

    return validate


def test_every_document_is_checked_and_every_error_has_its_line(validate) -> None:
    bad = manifest("ant", env__envpool__numEnvs=0, replicas="2", replica=2)
    text = GOOD + "---\n" + yaml.safe_dump(bad, sort_keys=False) + "---\nkind: ConfigMap\n"
    lines = text.splitlines()
    at, replicas = lines.index("      numEnvs: 0") + 1, lines.index("  replicas: '2'") + 1
    unknown = lines.index("  replica: 2") + 1
    assert validate(text)[0] == 2
    assert validate(text)[1] == [
        f"job.yaml:{at}: document 2 (ant): spec.env.envpool.numEnvs: 0 is less than 1; write a number from 1 to 65536",
        f'job.yaml:{replicas}: document 2 (ant): spec.replicas: "2" is not an integer',
        f"job.yaml:{unknown}: document 2 (ant): spec.replica: unknown field; did you mean replicas?",
        f'job.yaml:{len(lines)}: document 3: kind: "ConfigMap" is not supported; write kind: CollectorJob',
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "job.yaml: contains no document"),
        ("---\n---\n# nothing\n", "job.yaml: contains no document"),
        ("a: [\n", "job.yaml:2: is not valid YAML: while parsing a flow node"),
        ("a: b: c\n", "job.yaml:1: is not valid YAML: mapping values are not allowed here"),
        ("kind: a\0b\n", "job.yaml: is not valid YAML: unacceptable character #x0000"),
        (b"kind: \xff\n", "job.yaml: is not UTF-8 text: invalid start byte at position 6"),
        ("[" * 2000, "job.yaml: is nested too deeply"),
        ("pong\n", "job.yaml:1: document 1: the document is not an object"),
        ("a: &a [*a]\n", "job.yaml:1: document 1: its aliases expand to more than"),
        (ALIAS_BOMB, "job.yaml:1: document 1: its aliases expand to more than"),
        ("kind: !!python/object:os.system x\n", "job.yaml:1: document 1: is not valid YAML: could not determine"),
        ("? [a, b]\n: 1\n", "job.yaml:1: document 1: is not valid YAML: found unhashable key"),
        ("a: b\n" * (MAX_BYTES // 4), f"job.yaml: has more than {MAX_BYTES} bytes"),
        (HEAD + "kind: CollectorJob\n", "job.yaml:4: document 1: kind: is set twice, on lines 2 and 4; keep one"),
        # What YAML takes a value for.
        (job_with("replicas: yes"), "true is not an integer"),
        (job_with("image: 1.5"), "1.5 is not a string; quote it"),
        (job_with("replicas: 1e30"), "1e+30 is greater than 9999"),
        (job_with("replicas: .inf"), "Infinity is not an integer"),
        (job_with("replicas: -" + "9" * 5000), "is not valid YAML: Exceeds the limit"),
        (job_with("replicas: 1:30"), '"1:30" is not an integer'),
        (job_with("replicas: !!timestamp 2026-01-01"), 'datetime.date(2026, 1, 1)" is not an integer'),
        (job_with("image: !!binary aGVsbG8="), "\"b'hello'\" is not a string; quote it"),
        (job_with("code: {}"), "exactly one of configMap and image is required, found 0; write one"),
        (job_with("code: {configMap: a, image: 'b:1'}"), "is required, found 2; write one"),
        (job_with("code: {image: 'b 1'}"), 'spec.code.image: "b 1" is not valid; write the name of a container image'),
    ],
)
def test_what_is_no_manifest_gets_one_sentence(validate, content: str | bytes, sentence: str) -> None:
    code, lines = validate(content)
    assert (code, len(lines)) == (2, 1)
    assert sentence in lines[0]


@pytest.mark.parametrize(
    "content",
    [
        job_with("replicas: 1e1"),
        job_with("replicas: 0x0a"),
        job_with("replicas: 010"),
        job_with("replicas: 1_0"),
        job_with("suspend: yes"),
        job_with("image: 2026-01-01"),  # a string
        job_with("workerGroups:\n  - &a {name: cpu, template: {}}\n  - {<<: *a, name: b, replicas: 1}"),
        b"\xef\xbb\xbf" + GOOD.encode(),  # a byte order mark
    ],
)
def test_what_kubectl_accepts_is_accepted(validate, content: str | bytes) -> None:
    assert validate(content) == (0, [])


def test_missing_file_directory_and_bad_file_are_all_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tmp_path / "good.yaml"
    good.write_text(GOOD)
    assert run(["validate", str(tmp_path / "none.yaml"), str(tmp_path), str(good)]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"{tmp_path}/none.yaml: cannot be read: No such file or directory; check the path",
        f"{tmp_path}: cannot be read: Is a directory; check the path",
    ]
    assert out == f"{good}: pong: ok\n"


def test_json_report_has_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(job_with("replicas: -1"))
    assert run(["validate", "--json", str(file)]) == 2
    message = "-1 is less than 0; write a number from 0 to 9999"
    problem = {"document": 1, "name": "pong", "line": 8, "path": "spec.replicas", "message": message}
    report = {"valid": False, "files": [{"source": str(file), "jobs": [], "problems": [problem]}]}
    assert json.loads(capsys.readouterr().out) == report


def test_entrypoints_are_looked_up_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "job.yaml"
    text = (Path(__file__).parents[3] / "examples/pong.yaml").read_text()
    job.write_text(text.replace("cormorant.policies:atari_cnn", "mine:make"))
    (tmp_path / "mine.py").write_text("def maker(observation_space, action_space): ...\n")
    assert judge(str(job))[1] == ()
    monkeypatch.chdir(tmp_path)
    for file in (str(job), "-"):
        with job.open() as text:
            monkeypatch.setattr(sys, "stdin", text)
            (problem,) = judge(file, imports=True)[1]
        expected = f"{file}: spec.policy.entrypoint: mine:make: mine has no make; did you mean maker?"
        assert str(problem).startswith(expected)


SOURCE = """
raise RuntimeError("never run")
import torch as th
if True:
    def guarded(observation_space, action_space): ...
def make(observation_space, action_space, hidden=64, *, activation="tanh"): ...
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
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("raise RuntimeError('never run')\n")
    (tmp_path / "pkg" / "nets.py").write_text("def make(o, a): ...\n")
    (tmp_path / "front.py").write_text("from pkg.nets import make as build\nfrom nowhere import lost\n")
    return tmp_path


@pytest.mark.parametrize(
    ("entrypoint", "kwargs", "sentence"),
    [
        ("my_policies:make", {"hidden": 3, "activation": "relu"}, ""),
        ("my_policies:guarded", {}, ""),
        ("my_policies:Policy", {"width": 2}, ""),
        ("my_policies:Policy.build", {}, ""),
        ("broken:anything", {}, ""),
        ("cormorant.policies:mlp", {}, ""),
        ("front:lost", {"x": 1}, ""),
        ("nothing_alike:make", {}, "there is no module nothing_alike; put it beside the manifest"),
        ("my_policy:make", {}, "there is no module my_policy; did you mean my_policies?"),  # and not mypy
        ("pkg.net:make", {}, "there is no module pkg.net; did you mean pkg.nets?"),
        ("my_policies:mak", {}, "my_policies has no mak; did you mean make?"),
        ("cormorant.policies:mpl", {}, "has no mpl; did you mean mlp"),
        ("my_policies:make", {"hiden": 3}, "has no argument hiden; did you mean hidden?"),
        ("my_policies:make", {"zzz": 3}, "has no argument zzz; it has hidden, activation"),
        ("my_policies:Policy", {"witdh": 2}, "has no argument witdh; did you mean width?"),
        ("front:build", {"hidden": 3}, "front:build has no argument hidden; it takes none"),
    ],
)
def test_typos_are_found_with_near_matches(
    folder: Path, entrypoint: str, kwargs: dict[str, Any], sentence: str
) -> None:
    found = trouble(folder, entrypoint, **kwargs)
    assert sentence in found
    assert bool(found) == bool(sentence), "it exists, or that cannot be known"


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


TEXTS = [yaml.safe_dump(document) for document in VALID.values()]
TOKENS = st.sampled_from(
    [*"{}[]:,-?&*!|>'\"%@`#\n\t ", "---", "...", "<<: *a", "&a", "!!set", "!!float x", "0x", "~", "1e999"]
)


@settings(max_examples=400)
@given(st.just("") | st.sampled_from(TEXTS), st.data())
def test_any_text_and_manifests_with_random_edits_are_handled(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 12)))
    edit = st.text(max_size=4) | TOKENS if text else st.text(max_size=200) | st.lists(TOKENS, max_size=30).map("".join)
    with suppress(ManifestError):
        parse_jobs(text[:start] + data.draw(edit) + text[end:], "job.yaml")
