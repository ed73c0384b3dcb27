"""`/docs`: the OpenAPI document as one page: a curl line and examples for each operation, a table for each schema. No
script and nothing from elsewhere: clusters may have no way out.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """:root{color-scheme:light dark;--line:#8884;--dim:light-dark(#666,#999);--code:light-dark(#f4f4f4,#1c1c1c)}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:light-dark(#222,#ddd);
background:light-dark(#fff,#111)}a{color:light-dark(#0645ad,#8ab4f8)}code,pre{font-size:13.5px}
pre{background:var(--code);padding:.6rem .8rem;overflow-x:auto;margin:.4rem 1rem;border-radius:4px}
h2{margin-top:2rem;border-bottom:1px solid var(--line)}h3{margin:1.4rem 0 .2rem;font-size:15px}details{margin:.4rem 0}
summary{cursor:pointer}table{border-collapse:collapse;margin:.4rem 1rem}
td{padding:.1rem .8rem .1rem 0;vertical-align:top}.dim{color:var(--dim)}p{margin:.4rem 1rem}"""
_HOW = (
    "<p>In the examples <code>$URL</code> is this head, e.g. <code>http://127.0.0.1:8000</code>, and "
    "<code>$TOKEN</code> a token of the role that is named. For tools: <a href=/openapi.json>openapi.json</a></p>"
)
_DEEPEST = 4
_JSON = "application/json"

Json = Mapping[str, Any]


def render(document: Json) -> str:
    info, schemas = document["info"], document.get("components", {}).get("schemas", {})
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info.get('description', ''))}</p>",
        _HOW,
    ]
    for tag in document.get("tags", ()):
        parts.append(f"<h2>{escape(tag['name'])}</h2><p>{escape(tag.get('description', ''))}</p>")
        parts += _operations(document, schemas, tag["name"])
    parts.append("<h2>Schemas</h2>")
    parts += [_schema(name, schema) for name, schema in sorted(schemas.items())]
    return "\n".join(parts)


def example_of(schema: Json, schemas: Json, *, depth: int = 0) -> Any:
    if "$ref" in schema:
        return example_of(schemas[_name_of(schema)], schemas, depth=depth)
    if given := schema.get("example", schema.get("default", schema.get("const"))):
        return given
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return example_of(schema[key][0], schemas, depth=depth)
    if schema.get("type") == "object":
        if depth >= _DEEPEST:
            return {}
        if "properties" in schema:
            return {name: example_of(of, schemas, depth=depth + 1) for name, of in schema["properties"].items()}
        inner = schema.get("additionalProperties")
        return {"name": example_of(inner, schemas, depth=depth + 1)} if isinstance(inner, dict) else {}
    if schema.get("type") == "array":
        return [example_of(schema["items"], schemas, depth=depth + 1)] if "items" in schema else []
    is_time = schema.get("format") == "date-time"
    plain = {"string": "2026-01-31T12:00:00Z" if is_time else "...", "integer": 7, "number": 0.5, "boolean": True}
    return plain.get(schema.get("type", ""))


def _operations(document: Json, schemas: Json, tag: str) -> Iterator[str]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if tag not in operation.get("tags", ()):
                continue
            role = operation.get("x-cormorant-role", "")
            curl = escape(_curl(method, path, operation, schemas))
            yield (
                f"<details id={escape(operation['operationId'])}><summary><code>{method.upper()} {escape(path)}</code> "
                f"<span class=dim>{escape(role)}</span></summary>"
                f"<p>{escape(operation.get('description', ''))}</p><pre>{curl}</pre>"
                f"{_table(operation)}{_answer(operation, schemas)}</details>"
            )


def _curl(method: str, path: str, operation: Json, schemas: Json) -> str:
    needed = {given["name"]: given for given in operation.get("parameters", ()) if given.get("required")}
    target = path
    for name in [name for name in needed if "{" + name + "}" in path]:
        target = target.replace("{" + name + "}", name.upper())
        del needed[name]
    words = ["curl", *{"get": [], "head": ["--head"]}.get(method, ["-X", method.upper()])]
    if "x-cormorant-role" in operation:
        words += ["-H", '"Authorization: Bearer $TOKEN"']
    words += [word for name in needed for word in ("-H", shlex.quote(f"{name}: *"))]
    content = operation.get("requestBody", {}).get("content", {})
    if _JSON in content:
        body = json.dumps(example_of(content[_JSON]["schema"], schemas))
        words += ["-H", f"'Content-Type: {_JSON}'", "-d", shlex.quote(body)]
    elif content:
        words += ["-H", f"'Content-Type: {next(iter(content))}'", "--data-binary", "@FILE.safetensors"]
    answers = operation.get("responses", {}).get("200", {}).get("content", {})
    if method == "get" and any("safetensors" in kind for kind in answers):
        words += ["-o", "FILE.safetensors"]
    elif "text/event-stream" in answers:
        words += ["--no-buffer"]
    return " ".join([*words, f'"$URL{target}"'])


def _table(operation: Json) -> str:
    rows = [
        (f"{given['in']} {given['name']}", given.get("description", "") or _type_of(given.get("schema", {})), False)
        for given in operation.get("parameters", ())
    ]
    body = operation.get("requestBody")
    if body is not None:
        kinds = [_type_of(of.get("schema", {})) if kind == _JSON else kind for kind, of in body["content"].items()]
        rows.append(("body", ", ".join([*filter(None, [escape(body.get("description", ""))]), *kinds]), True))
    rows += [
        (code, answer.get("description", ""), False) for code, answer in sorted(operation.get("responses", {}).items())
    ]
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{text if is_html else escape(text)}" for name, text, is_html in rows
    )
    return f"<table>{cells}</table>"


def _answer(operation: Json, schemas: Json) -> str:
    for code, answer in sorted(operation.get("responses", {}).items()):
        schema = answer.get("content", {}).get(_JSON, {}).get("schema")
        if code < "300" and schema:
            example = json.dumps(example_of(schema, schemas), indent=1)
            return f"<p>{escape(code)}: {_type_of(schema)}</p><pre>{escape(example)}</pre>"
    return ""


def _schema(name: str, schema: Json) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{'' if field in required else ' <span class=dim>optional</span>'}"
        f"<td>{_type_of(of)}<td>{escape(of.get('description', ''))}"
        for field, of in schema.get("properties", {}).items()
    )
    text = escape(schema.get("description", ""))
    return f"<h3 id=schema-{escape(name)}>{escape(name)}</h3><p>{text}</p><table>{rows}</table>"


def _type_of(schema: Json) -> str:
    """A schema in a word or two, with links, as HTML."""
    if "$ref" in schema:
        name = escape(_name_of(schema))
        return f"<a href=#schema-{name}>{name}</a>"
    if "enum" in schema:
        return escape(" | ".join(map(str, schema["enum"])))
    if "const" in schema:
        return escape(str(schema["const"]))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " | ".join(map(_type_of, schema[key]))
    kind = str(schema.get("type", "any"))
    if kind == "array" and "items" in schema:
        return f"list of {_type_of(schema['items'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type_of(schema['additionalProperties'])}"
    limits = [f"{word} {schema[key]:g}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    return escape(" ".join([kind, *limits]))


def _name_of(schema: Json) -> str:
    return str(schema["$ref"]).rpartition("/")[2]
