"""`cormorant submit FILE`: sends the jobs of a manifest to a cluster, with their code.

    validate locally -> the job -> ConfigMap of --code, which is deleted with the job

    my_policies.py            -> binaryData["my_policies.py"]
    my_pkg/__init__.py, ...   -> binaryData["packages.zip"]  a ConfigMap has no folders; Python imports from the archive

Equal files give the same name and bytes; changed code becomes another ConfigMap, and the job's pods are replaced.

Server-side apply: submitting a changed manifest updates the job; fields of other owners (an autoscaler's replicas) stay
theirs.
"""

import base64
import hashlib
import io
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from cormorant_cli.cluster import Cluster, Raw, connected, identity
from cormorant_cli.connection import Context, Namespace
from cormorant_cli.errors import BadInput, CommandFailed
from cormorant_cli.printing import tell
from cormorant_contract.children import CODE_ARCHIVE, JOB, code_config_map
from cormorant_contract.job import API_VERSION, KIND, CollectorJob
from cormorant_manifest.reader import load_jobs

Files = Mapping[str, bytes]
"""Content by key of a ConfigMap."""
MOST_BYTES = 1024 * 1024
"""Largest data of one ConfigMap that the API server accepts."""
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_SKIPPED = ("__pycache__", "node_modules")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip archive can hold."""


def submit(
    manifest: Annotated[
        str, typer.Argument(metavar="FILE", help="CollectorJob manifest in YAML; - reads standard input.")
    ],
    code: Annotated[
        Path | None, typer.Option("--code", metavar="DIR", help="Folder with environments and policies, at most 1 MiB.")
    ] = None,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Create or update the jobs of a manifest, after the same checks as `cormorant validate`."""
    jobs = load_jobs(manifest)
    files = read_code(code) if code is not None else None
    for job in jobs:
        _refuse_contradictions(job, files, namespace=namespace, is_alone=len(jobs) == 1)
    with connected(context) as cluster:
        target = namespace or cluster.namespace
        made = [_submit(cluster, document_of(job, files, namespace=target), files) for job in jobs]
    tell([raw for raw, _ in made], *(f"{identity(raw)}: {word}" for raw, word in made))


def document_of(job: CollectorJob, files: Files | None, *, namespace: str) -> Raw:
    """The document to send: the fields that the user wrote, without defaults, so that the sender owns no other fields.
    `namespace`: used if the manifest has none.
    """
    written = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    given = written["metadata"]
    metadata = {key: given[key] for key in ("name", "namespace", "labels", "annotations") if key in given}
    metadata.setdefault("namespace", namespace)
    spec = written["spec"]
    if files is not None:
        spec = {**spec, "code": {"configMap": code_name(files, job.metadata.name)}}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def _refuse_contradictions(job: CollectorJob, files: Files | None, *, namespace: str, is_alone: bool) -> None:
    name, written = job.metadata.name, job.metadata.namespace
    if namespace and "namespace" in job.metadata.model_fields_set and written != namespace:
        raise BadInput(
            f'the manifest puts {name} in namespace "{written}", --namespace says "{namespace}"; remove one of them'
        )
    if files is None:
        return
    if not is_alone:
        raise BadInput("--code works with one job, but the manifest has several; submit them one by one")
    if job.spec.code is not None:
        raise BadInput(f"spec.code of {name} names other code than --code; remove one of them")


def _submit(cluster: Cluster, document: Raw, files: Files | None) -> tuple[Raw, str]:
    """Apply a job and its code. Returns the job, and what was done with it."""
    name, namespace = document["metadata"]["name"], document["metadata"]["namespace"]
    before = cluster.find("CollectorJob", name, namespace=namespace)
    if before is not None and "deletionTimestamp" in before["metadata"]:
        raise CommandFailed(f"{identity(before)} is being deleted; submit it again once it is gone")
    job, is_created = cluster.apply(document)
    if files is not None:
        # After the job, its owner: Kubernetes deletes both together, and the ConfigMap of a deleted job of this name is
        # taken over. The operator needs longer to create a pod that mounts it.
        cluster.apply(code_manifest(files, job))
    if is_created:
        return job, "created"
    generations = (raw["metadata"].get("generation") for raw in (before or job, job))
    return job, "unchanged" if len(set(generations)) == 1 else "changed"


# -- code ------------------------------------------------------------------------------------------------------


def code_name(files: Files, job: str) -> str:
    """Name of a job's ConfigMap with these files."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    # Lower-case base 32: every character is valid in a name.
    return code_config_map(job, base64.b32encode(digest.digest()).decode().lower()[:8])


def code_manifest(files: Files, job: Raw) -> Raw:
    """The ConfigMap. `job`: as the server returned it: Kubernetes deletes the ConfigMap with the job."""
    binary = {file: base64.b64encode(data).decode() for file, data in files.items()}
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    owner = {key: job[key] for key in ("apiVersion", "kind")} | {key: job["metadata"][key] for key in ("name", "uid")}
    metadata: Raw = {
        "name": code_name(files, name),
        "namespace": namespace,
        "labels": {"app.kubernetes.io/name": "cormorant", "app.kubernetes.io/part-of": "cormorant", JOB: name},
        "ownerReferences": [owner],
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "binaryData": binary}


def read_code(folder: Path) -> dict[str, bytes]:
    """The files of a folder, without hidden ones, bytecode and links. BadInput if they are no code, or too large."""
    if not folder.is_dir():
        raise BadInput(f"--code {folder}: {'is a file; name its folder' if folder.exists() else 'no such folder'}")
    files: dict[str, bytes] = {}
    packed: dict[str, bytes] = {}

    def refuse(error: OSError) -> NoReturn:
        raise BadInput(f"--code: cannot read {error.filename}: {error.strerror or error}") from error

    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED]
        for path in (Path(root, name) for name in names):
            if path.name.startswith(".") or path.suffix == ".pyc" or path.is_symlink() or not path.is_file():
                continue
            name = path.relative_to(folder).as_posix()
            try:
                (packed if "/" in name else files)[name] = path.read_bytes()
            except OSError as error:
                refuse(error)
    if bad := [name for name in files if not _KEY.fullmatch(name) or (packed and name == CODE_ARCHIVE)]:
        raise BadInput(
            f'--code {folder}: "{bad[0]}" cannot be a key of a ConfigMap; name files with letters, digits, dashes, '
            f"dots and underscores, and none {CODE_ARCHIVE}, which has the packages"
        )
    if not any(name.endswith(".py") for name in (*files, *packed)):
        raise BadInput(f"--code {folder}: no Python files found")
    if packed:
        buffer = io.BytesIO()  # reproducible bytes: no timestamps or modes
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name in sorted(packed):
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), packed[name], zipfile.ZIP_DEFLATED)
        files[CODE_ARCHIVE] = buffer.getvalue()
    total = sum(len(name) + len(data) for name, data in files.items())
    if total > MOST_BYTES:
        raise BadInput(
            f"--code {folder}: {total:,} bytes do not fit a ConfigMap, which holds {MOST_BYTES:,}; remove data files "
            "or build the code into an image"
        )
    return files
