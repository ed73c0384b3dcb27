"""`submit --code DIR`: a folder of user code as the ConfigMap that `spec.code` names.

    my_policies.py            -> data["my_policies.py"]      readable with kubectl
    assets.bin                -> binaryData["assets.bin"]
    my_pkg/__init__.py, ...   -> binaryData["packages.zip"]  a ConfigMap has no folders; Python imports from the archive

Equal files give the same name and bytes; changed code becomes another ConfigMap, and the job's pods are replaced.
"""

import base64
import hashlib
import io
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cormorant_cli.cluster import Raw
from cormorant_cli.errors import BadInput
from cormorant_contract.children import CODE_ARCHIVE, JOB, code_config_map

MOST_BYTES = 1024 * 1024
"""Largest data of one ConfigMap that the API server accepts."""
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_SKIPPED = ("__pycache__", "node_modules")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip archive can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeMap:
    files: Mapping[str, bytes]

    def name(self, job: str) -> str:
        """The ConfigMap's; others if the files differ."""
        found = hashlib.sha256()
        for name, data in sorted(self.files.items()):
            found.update(f"{name}\0{len(data)}\0".encode() + data)
        # Lower-case base 32: every character is valid in a name.
        return code_config_map(job, base64.b32encode(found.digest()).decode().lower()[:8])

    def manifest(self, job: str, *, namespace: str, owner: Raw) -> Raw:
        """The ConfigMap. `owner`: the job as the server returned it: Kubernetes deletes the ConfigMap with the job."""
        text = {name: data.decode() for name, data in self.files.items() if _is_text(data)}
        binary = {name: base64.b64encode(data).decode() for name, data in self.files.items() if name not in text}
        metadata: Raw = {
            "name": self.name(job),
            "namespace": namespace,
            "labels": {"app.kubernetes.io/name": "cormorant", "app.kubernetes.io/part-of": "cormorant", JOB: job},
            "ownerReferences": [
                {key: owner[key] for key in ("apiVersion", "kind")}
                | {key: owner["metadata"][key] for key in ("name", "uid")}
            ],
        }
        parts = {key: value for key, value in (("data", text), ("binaryData", binary)) if value}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, **parts}


def read_code(folder: Path) -> CodeMap:
    """The files of a folder, without hidden ones, bytecode and links. BadInput if they are no code, or too large."""
    if not folder.is_dir():
        raise BadInput(f"--code {folder}: {'is a file; name its folder' if folder.exists() else 'no such folder'}")
    files: dict[str, bytes] = {}
    packed: dict[str, bytes] = {}
    for path in _files_below(folder):
        relative = path.relative_to(folder)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BadInput(f"--code {folder}: cannot read {relative}: {error.strerror or error}") from error
        if len(relative.parts) > 1:
            packed[relative.as_posix()] = data
        elif relative.name == CODE_ARCHIVE and packed:
            raise BadInput(
                f"--code {folder}: the name {CODE_ARCHIVE} is reserved for the packed packages; rename the file"
            )
        elif not _KEY.fullmatch(relative.name):
            raise BadInput(
                f'--code {folder}: "{relative.name}" cannot be a key of a ConfigMap; name files with letters, digits, '
                "dashes, dots and underscores"
            )
        else:
            files[relative.name] = data
    names = [*files, *packed]
    if not any(name.endswith(".py") for name in names):
        raise BadInput(f"--code {folder}: no Python files found")
    if packed:
        buffer = io.BytesIO()  # reproducible bytes: no timestamps or modes
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name in sorted(packed):
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), packed[name], zipfile.ZIP_DEFLATED)
        files[CODE_ARCHIVE] = buffer.getvalue()
    total = sum(len(name) + len(data) for name, data in files.items())
    if total <= MOST_BYTES:
        return CodeMap(files=files)
    every = {name: data for name, data in files.items() if name != CODE_ARCHIVE or not packed} | packed
    largest = sorted(every, key=lambda name: len(every[name]), reverse=True)[:3]
    shown = ", ".join(f"{name} {len(every[name]):,}" for name in largest)
    raise BadInput(
        f"--code {folder}: {total:,} bytes do not fit a ConfigMap, which holds {MOST_BYTES:,}; the largest are {shown}"
        "; remove data files, or build the code into an image"
    )


def _files_below(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.iterdir(), key=lambda path: (not path.is_dir(), path.name)):
        if path.name.startswith(".") or path.name in _SKIPPED or path.is_symlink():
            continue
        if path.is_dir():
            found += _files_below(path)
        elif path.is_file() and path.suffix != ".pyc":
            found.append(path)
    return found


def _is_text(data: bytes) -> bool:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    return "\0" not in text
