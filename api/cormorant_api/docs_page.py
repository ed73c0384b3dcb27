"""`/docs`: the OpenAPI document as one page. No script and nothing from elsewhere: clusters may have no way out."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
code{font-size:14px}h2{margin-top:2rem;border-bottom:1px solid #ccc}details{margin:.4rem 0}
summary{cursor:pointer}table{border-collapse:collapse;margin:.4rem 1rem}td{padding:.1rem .8rem .1rem 0;
vertical-align:top}.role{color:#777}p{margin:.4rem 1rem}"""


def render(document: Mapping[str, Any]) -> str:
    """The page for an OpenAPI document."""
    info = document["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info.get('description', ''))}</p>",
        "<p>For tools: <a href=/openapi.json>openapi.json</a></p>",
    ]
    for tag in document.get("tags", ()):
        parts.append(f"<h2>{escape(tag['name'])}</h2><p>{escape(tag.get('description', ''))}</p>")
        parts += _operations(document, tag["name"])
    return "\n".join(parts)


def _operations(document: Mapping[str, Any], tag: str) -> Iterator[str]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if tag not in operation.get("tags", ()):
                continue
            role = operation.get("x-cormorant-role", "")
            yield (
                f"<details><summary><code>{method.upper()} {escape(path)}</code> "
                f"<span class=role>{escape(role)}</span></summary>"
                f"<p>{escape(operation.get('description', ''))}</p>{_table(operation)}</details>"
            )


def _table(operation: Mapping[str, Any]) -> str:
    rows = [
        (f"{given['in']} {given['name']}", given.get("description", "") or given.get("schema", {}).get("type", ""))
        for given in operation.get("parameters", ())
    ]
    body = operation.get("requestBody")
    if body is not None:
        rows.append(("body", ", ".join([body.get("description", ""), *body.get("content", {})]).strip(", ")))
    rows += [(code, answer.get("description", "")) for code, answer in sorted(operation.get("responses", {}).items())]
    cells = "".join(f"<tr><td><code>{escape(name)}</code><td>{escape(text)}" for name, text in rows)
    return f"<table>{cells}</table>"
