"""`make wire BASE=REVISION`: what others rely on, compared with an earlier revision, descriptions aside.

Both revisions are dumped by this file: the CustomResourceDefinition, metrics, the OpenAPI document, names of labels,
annotations and environment variables, and the files that a run leaves on disk. Values that differ between two runs of
one revision (times, digests, hosts, tokens) count by their type. The exit code is 1 when anything was removed or
changed, which is removed and added.
"""

import hashlib
import json
import os
import pickletools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cormorant_testing.scripts import Server, unused_port

ROOT = Path(__file__).resolve().parents[3]
Surface = dict[str, str]
_WORDS = {"description", "summary", "title", "example", "examples", "message", "messageExpression", "help"}
_NAME = re.compile(r"(CORMORANT_[A-Z_]+|RAY_[A-Z_a-z]+|POD_IP|([a-z-]+\.)*cormorant\.dev(/[A-Za-z0-9_./-]+)?)")
_VOLATILE = re.compile(
    r"time|date|since|second|stamp|uuid|host|pid|token|digest|sha256|etag|version|_at$|^run$|python", re.I
)
_JOB = """\
apiVersion: cormorant.dev/v1alpha1
kind: CollectorJob
metadata: {name: wire}
spec:
  env: {gymnasium: {id: CartPole-v1, vectorization: inline, numEnvs: 2}}
  policy: {entrypoint: "cormorant.policies:mlp"}
  collection: {framesPerBatch: 32, seed: 3, mode: sync%s}
  output: {%s}
  replicas: 1
"""


def flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of nested JSON by their paths. Lists of mappings with a `name` are keyed by it; words are left out."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            named = path.endswith(("properties", "schemas", "paths"))  # there a key is a name, whatever it spells
            if named or key not in _WORDS:
                yield from flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for place, inner in enumerate(value):
            key = inner["name"] if isinstance(inner, Mapping) and isinstance(inner.get("name"), str) else place
            yield from flat(inner, f"{path}[{key}]")
    else:
        yield path, json.dumps(value)


def shape(value: Any, name: str = "") -> Any:
    """JSON with volatile leaves replaced by their types. What is below a volatile name is volatile, too."""
    if isinstance(value, Mapping):
        return {key: shape(inner, name if _VOLATILE.search(name) else key) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner, name) for inner in value]
    if isinstance(value, str) and value.startswith("{"):
        return shape(json.loads(value), name)
    return type(value).__name__ if _VOLATILE.search(name) else value


def metrics() -> Surface:
    from cormorant_contract.metrics import METRICS

    return {
        f"{exporter}.{metric.name}": f"{metric.kind} {metric.buckets} {[(x.name, x.values) for x in metric.labels]}"
        for exporter, declared in METRICS.items()
        for metric in declared
    }


def names(tree: Path) -> Surface:
    """Labels, annotations and environment variables, wherever the code and the chart's templates have the words."""
    sources = [path for room in ("api", "worker", "operator") for path in (tree / room).rglob("*.py")]
    sources += (tree / "charts/cormorant/templates").rglob("*.yaml")
    found = {match[0].rstrip("./") for path in sources for match in _NAME.finditer(path.read_text())}
    return dict.fromkeys(sorted(found), "name")


def files(folder: Path) -> Surface:
    """A dataset of one worker, a head's directory and a saved state, as `cormorant` leaves them."""
    (folder / "data.yaml").write_text(_JOB % (", totalFrames: 96", "dataset: {uri: data}"))
    (folder / "served.yaml").write_text(_JOB % ("", "queue: {capacityBatches: 1}"))
    _cormorant("run", "data.yaml", cwd=folder)
    port = unused_port()
    url = f"http://127.0.0.1:{port}"
    command = [*_CORMORANT, "run", "served.yaml", "--serve", "--directory", "head", "--port", str(port)]
    os.environ |= {"CORMORANT_URL": url, "CORMORANT_TOKEN_FILE": str(folder / "head/tokens.json")}
    with Server(command, f"{url}/readyz", cwd=folder) as head:
        _cormorant("weights", "init", "served.yaml", "policy.safetensors", cwd=folder)
        _cormorant("weights", "push", "policy.safetensors", cwd=folder)
        _cormorant("pause", cwd=folder)
        _cormorant("state", "save", "state", cwd=folder)
        head.end()
    found: Surface = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in ("data.yaml", "served.yaml", "policy.safetensors"):
            found[name] = "file"
            found |= {f"{name}: {key}": value for key, value in contents(path, path.read_bytes())}
    return found


def contents(path: Path, raw: bytes) -> Iterator[tuple[str, str]]:
    """JSON by its leaves, safetensors and Arrow by their headers and values, pickles by the names they import."""
    if path.suffix == ".arrow":
        import pyarrow.ipc

        table = pyarrow.ipc.open_file(raw).read_all()
        for field in table.schema:
            values = hashlib.sha256(repr(table[field.name].to_pylist()).encode()).hexdigest()
            yield field.name, f"{field.type}{'' if _VOLATILE.search(field.name) else ' ' + values}"
        yield from ((f"metadata {key.decode()}", "metadata") for key in table.schema.metadata or {})
        return
    if len(raw) > 8 and raw[8:9] == b"{":
        size = int.from_bytes(raw[:8], "little")
        header, raw = json.loads(raw[8 : 8 + size]), raw[8 + size :]
        for name, entry in header.items():
            begin, end = entry.pop("data_offsets", (0, 0))
            if entry.get("dtype") == "U8" and raw[begin:end][8:9] == b"{":  # a file within the file: a worker's state
                del entry["shape"]
                yield from ((f"{name}: {key}", value) for key, value in contents(path, raw[begin:end]))
        yield from flat(shape(header), "header")
    elif raw[:1] in (b"{", b"["):
        for number, line in enumerate([raw.decode()] if path.suffix == ".json" else raw.decode().splitlines()):
            yield from flat(shape(json.loads(line), path.name), f"line {number}")
        return
    elif len(raw) < 100:
        yield "text", re.sub(r"\d+", "N", raw.decode())
        return
    for start in [match.start() for match in re.finditer(rb"\x80[\x04\x05]\x95", raw)]:
        strings: list[str] = []
        for code, argument, _ in pickletools.genops(raw[start:]):
            if isinstance(argument, str):
                strings.append(argument)
            if code.name == "STACK_GLOBAL":
                yield f"pickled {strings[-2]}.{strings[-1]}", "name"


_CORMORANT = [sys.executable, "-m", "cormorant_cli"]


def _cormorant(*words: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([*_CORMORANT, *words], cwd=cwd, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"cormorant {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def dump(tree: Path) -> Iterator[str]:
    """Lines; those of one tree are the same each time."""
    with tempfile.TemporaryDirectory() as folder:
        surfaces = {
            "crd": dict(flat(yaml.safe_load(_cormorant("crd")))),
            "metrics": metrics(),
            "openapi": dict(flat(json.loads(_cormorant("openapi")))),
            "names": names(tree),
            "files": files(Path(folder)),
        }
    for surface, found in surfaces.items():
        yield from (f"{surface}: {key} = {value}\n" for key, value in found.items())


def dump_of(tree: Path) -> set[str]:
    """The dump of a tree's own code, in a process of its own."""
    rooms = [*(str(tree / room) for room in ("api", "worker", "operator")), str(ROOT / "tests/support")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(rooms)}
    command = [sys.executable, __file__, "--dump", str(tree)]
    dumped = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return set(dumped.splitlines(keepends=True))


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--dump"]:
        sys.stdout.writelines(dump(Path(arguments[1])))
        return 0
    if len(arguments) != 1:
        raise SystemExit("which revision is the base? make wire BASE=REVISION")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), arguments[0]], cwd=ROOT, check=True)
        try:
            base = dump_of(tree)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    now = dump_of(ROOT)
    differences = [f"- {line}" for line in base - now] + [f"+ {line}" for line in now - base]
    sys.stdout.writelines(sorted(differences, key=lambda line: line[2:]))
    return int(not base <= now)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
