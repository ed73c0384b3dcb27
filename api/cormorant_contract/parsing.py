"""Parses a loaded document into a CollectorJob, or into a list of all its problems, in sentences.

Called by all that read a manifest: the command line, the worker, the operator. The result is the API server's with the
CRD: strict types, unknown fields refused, a null counted as an absent field.
"""

import math
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from cormorant_contract.errors import ManifestError, Problem
from cormorant_contract.job import API_VERSION, KIND, CollectorJob
from cormorant_contract.schema import Schema, structural_schema
from cormorant_contract.sentences import brief, did_you_mean, kind_of, nearest, sentences

Location = tuple[str | int, ...]
Finding = tuple[Location, str]

_METADATA_FIELDS = (
    "name", "namespace", "labels", "annotations", "generateName", "uid", "resourceVersion", "generation",
    "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "finalizers", "ownerReferences",
    "managedFields", "selfLink",
)  # fmt: skip


def parse_job(document: object, source: str = "", *, position: int = 1) -> CollectorJob:
    """Make a CollectorJob from the result of a YAML or JSON reader.

    Args:
        source: File name as the user wrote it, with which problems begin.
        position: Position of the document in the source, from 1.

    Raises:
        ManifestError: With every problem found, not only the first.
    """
    findings = list(_refuse_kind(document))
    if not findings:
        assert isinstance(document, dict)
        findings = list(_refuse_values(document, ()))
        pruned = prune(document, structural_schema())
        metadata = pruned.get("metadata")
        findings += [
            # A fixed set in Kubernetes, though the model keeps what newer servers add.
            (("metadata", key), f"unknown field{nearest(key, _METADATA_FIELDS)}")
            for key in (metadata if isinstance(metadata, dict) else ())
            if isinstance(key, str) and key not in _METADATA_FIELDS
        ]
        try:
            job = CollectorJob.model_validate(pruned, by_alias=True, by_name=False)
        except ValidationError as error:
            known = [location for location, _ in findings]
            findings += [
                (location, sentence)
                for location, sentence in sentences(error, structural_schema())
                if not any(reported[: len(location)] == location for reported in known)
            ]
            findings = _without_echoes(findings)
        else:
            if not findings:
                return job
    name = name_of(document)
    raise ManifestError(
        [
            Problem(message=sentence, source=source, document=position, name=name, location=location)
            for location, sentence in findings
        ]
    )


def _without_echoes(findings: list[Finding]) -> list[Finding]:
    """Without "framesPerBatch is missing" where frames_per_batch is unknown and means it: one mistake, one problem."""
    unknown = [location for location, sentence in findings if sentence.startswith("unknown field")]

    def is_meant(location: Location) -> bool:
        siblings = (str(found[-1]) for found in unknown if found[:-1] == location[:-1])
        return any("did you mean" in nearest(name, [str(location[-1])]) for name in siblings)

    return [
        (location, sentence)
        for location, sentence in findings
        if not (sentence.startswith("is missing") and is_meant(location))
    ]


def name_of(document: object) -> str:
    """metadata.name of a document, if it has one, for messages."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def _refuse_kind(document: object) -> Iterator[Finding]:
    if document is None:
        yield (), f"the document is empty; a manifest begins with apiVersion: {API_VERSION} and kind: {KIND}"
    elif not isinstance(document, dict):
        yield (), f"the document is {kind_of(document)}, not a manifest; write apiVersion: {API_VERSION}, kind: {KIND}"
    elif document.get("kind") is None:
        yield ("kind",), f"is missing; add kind: {KIND}"
    elif document["kind"] != KIND:
        kind = str(document["kind"])
        near = " (case-sensitive)" if kind.lower() == KIND.lower() else ""
        remedy = did_you_mean(kind, [KIND], otherwise="; this command accepts only CollectorJobs")
        yield ("kind",), f"{brief(document['kind'])} is not {KIND}{near}{remedy}"
    elif document.get("apiVersion") is None:
        yield ("apiVersion",), f"is missing; add apiVersion: {API_VERSION}"
    elif document["apiVersion"] != API_VERSION:
        yield ("apiVersion",), f"{brief(document['apiVersion'])} is not supported; write apiVersion: {API_VERSION}"


def _refuse_values(value: object, location: Location) -> Iterator[Finding]:
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _refuse_values(item, (*location, key))
            else:
                yield (*location, str(key)), f"the key is {kind_of(key)}, not a string; quote it"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _refuse_values(item, (*location, index))
    elif isinstance(value, float) and not math.isfinite(value):
        yield location, f"{value} is not a finite number; write a finite one"
    elif not isinstance(value, (str, int, float, type(None))):
        remedy = "pass int(...) of it" if hasattr(value, "__index__") else "quote it to make it a string"
        yield location, f"{type(value).__name__} is not allowed in a manifest; {remedy}"


def prune(value: Any, schema: Schema, *, path: str = "", unknown: list[str] | None = None) -> Any:
    """Drop null fields that the schema knows, as the API server does: `dataset:` with nothing after it is absent.
    `unknown`: if given, fields that the schema does not know are also dropped, and their paths appended to it.
    """
    if isinstance(value, dict) and "additionalProperties" in schema:
        schema = {"properties": dict.fromkeys(value, schema["additionalProperties"])}
    if isinstance(value, dict) and "properties" in schema:
        known: Schema = schema["properties"]
        if unknown is not None:
            unknown += (f"{path}.{key}" for key in value if key not in known)
        return {
            key: prune(item, known.get(key, {}), path=f"{path}.{key}", unknown=unknown)
            for key, item in value.items()
            if (item is not None if key in known else unknown is None)
        }
    if isinstance(value, list) and "items" in schema:
        return [
            prune(item, schema["items"], path=f"{path}[{index}]", unknown=unknown) for index, item in enumerate(value)
        ]
    return value
