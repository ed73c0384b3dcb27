"""CollectorJob as a CustomResourceDefinition, made from the pydantic models.

`cormorant crd` prints it and the chart holds a copy. Kubernetes wants a structural schema: no references, no unions,
a type everywhere; a null in a manifest counts as an absent field, so unset optional fields need no `nullable`.
"""

from functools import cache
from typing import Any

from cormorant_contract.base import in_json_schema_words
from cormorant_contract.job import GROUP, KIND, VERSION, CollectorJob

Schema = dict[str, Any]

PLURAL = "collectorjobs"

_COLUMNS: tuple[tuple[str, str, str, str, int], ...] = (
    # name, type, path, description, priority (1: only with -o wide)
    ("Phase", "string", ".status.phase", "Summary of the conditions", 0),
    ("Reason", "string", ".status.reason", "What is in the way", 0),
    ("Frames", "integer", ".status.frames.collected", "Frames accepted by the output; episodes of an evaluation", 0),
    ("Target", "integer", ".status.frames.target", "Frames, or episodes, of the whole job", 0),
    ("FPS", "number", ".status.frames.perSecond", "Frames per second", 0),
    ("Version", "integer", ".status.weights.version", "Newest published policy version", 0),
    ("Workers", "string", ".status.workers", "Ready workers of those desired", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Time since the job was made", 0),
    ("Restarts", "integer", ".status.headRestarts", "Heads replaced after a failure", 1),
    ("Applied", "integer", ".status.weights.minAppliedVersion", "Oldest policy version that any worker uses", 1),
    ("Last-Frame", "date", ".status.frames.lastProgressTime", "Time since the last frame was counted", 1),
)


def crd() -> Schema:
    """The CustomResourceDefinition of CollectorJob, as plain data for YAML or JSON."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": "collectorjob",
                "shortNames": ["cjob"],
                "categories": ["all", "cormorant"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "description": description}
                        | ({"priority": priority} if priority else {})
                        for name, kind, path, description, priority in _COLUMNS
                    ],
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.elastic.replicas",
                            "labelSelectorPath": ".status.elastic.selector",
                        },
                    },
                    "schema": {"openAPIV3Schema": structural_schema()},
                }
            ],
        },
    }


@cache
def structural_schema() -> Schema:
    """The schema of a CollectorJob for the API server. Cached: callers must not change it."""
    raw = in_json_schema_words(CollectorJob.model_json_schema(by_alias=True))
    root = _inline(raw, raw["$defs"])
    properties = root["properties"]
    blocks = properties["spec"]["properties"]["env"]["properties"]
    for name, node in blocks["pettingzoo"]["properties"].items():
        if node == blocks["gymnasium"]["properties"].get(name):
            node["description"] = "As in gymnasium."
    return {
        "type": "object",
        "description": root["description"],
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this schema: cormorant.dev/v1alpha1."},
            "kind": {"type": "string", "description": "Always CollectorJob."},
            # The API server's own schema of metadata stands; a CRD may narrow the name and nothing else.
            "metadata": {"type": "object", "properties": {"name": properties["metadata"]["properties"]["name"]}},
            "spec": properties["spec"],
            # Defaults are for what users leave out; a status says what its writer wrote.
            "status": _without_defaults(properties["status"]),
        },
    }


def _inline(node: Schema, definitions: Schema) -> Schema:
    """Resolve references, optional unions and defaults of one node and all below it."""
    node = resolved(node, definitions)
    result: Schema = {"type": node["type"]} if "type" in node else {}
    for key, value in node.items():
        if key == "properties":
            result[key] = {name: _inline(child, definitions) for name, child in value.items()}
        elif key == "items" or (key == "additionalProperties" and isinstance(value, dict)):
            result[key] = _inline(value, definitions)
        elif key == "const":
            result["enum"] = [value]
        elif key == "description":
            result[key] = " ".join(value.split())
        elif key not in ("title", "$defs", "default", "additionalProperties"):
            result[key] = value
    if node.get("default") is not None:
        result["default"] = _trim(node["default"], result)
    return result


def resolved(node: Schema, definitions: Schema) -> Schema:
    """Merge a node's references into it; the node's own keys win. `X | None` is X: a null counts as absent."""
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        return resolved(target, definitions) | {key: value for key, value in node.items() if key != "$ref"}
    choices = [choice for choice in node.get("anyOf", ()) if choice.get("type") != "null"]
    if len(choices) == 1:
        rest = {key: value for key, value in node.items() if key not in ("anyOf", "default")}
        return resolved(choices[0], definitions) | rest
    return node


def _trim(value: Any, schema: Schema) -> Any:
    """Drop from a default what the schema's own defaults below it fill in."""
    if isinstance(value, list):
        return [_trim(item, schema["items"]) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    fields = {
        name: (_trim(item, schema["properties"][name]), schema["properties"][name]) for name, item in value.items()
    }
    return {name: item for name, (item, child) in fields.items() if item is not None and item != child.get("default")}


def _without_defaults(schema: Schema) -> Schema:
    result = {key: value for key, value in schema.items() if key != "default"}
    if "properties" in result:
        result["properties"] = {name: _without_defaults(child) for name, child in result["properties"].items()}
    if "items" in result:
        result["items"] = _without_defaults(result["items"])
    return result
