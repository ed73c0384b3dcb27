"""MkDocs hooks: the reference pages that the code generates, and the files of the repository's root as pages.

`mkdocs build` calls `on_files`. A page from the root keeps its links: those into `docs/` lead to pages of the site, all
others to the repository.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "ARCHITECTURE.md": "explanation/architecture.md",
    "CHANGELOG.md": "reference/changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "charts/cormorant/README.md": "reference/chart.md",
    "examples/README.md": "reference/examples.md",
    "benchmarks/README.md": "explanation/benchmarks.md",
}
_LINK = re.compile(r"\]\(([^)\s#:]+)((?:#[^)]*)?)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "reference/crd.md": crd_page(),
        "reference/cli.md": cli_page(),
        "reference/rest.md": rest_page(),
        **{
            page: root_page(source, page, config.extra["repository"])
            for source, page in ROOT_PAGES.items()
        },
    }
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(
    markdown: str, *, page: Any, config: MkDocsConfig, files: Files
) -> str:
    """Links of a page in docs/ that leave the folder lead to the page made from that file, or to the repository."""
    del files
    source = page.file.src_uri
    if source in ROOT_PAGES.values():
        return markdown
    return _relink(
        markdown,
        Path("docs") / source,
        source,
        config.extra["repository"],
        leaving_only=True,
    )


def root_page(source: str, page: str, repository: str) -> str:
    return _relink((ROOT / source).read_text(), Path(source), page, repository)


def _relink(
    text: str,
    source: Path,
    page: str,
    repository: str,
    *,
    leaving_only: bool = False,
) -> str:
    def replaced(match: re.Match[str]) -> str:
        target = os.path.normpath(source.parent / match[1])
        inside = target.startswith("docs/")
        if leaving_only and inside:
            return match[0]
        uri = target.removeprefix("docs/") if inside else ROOT_PAGES.get(target)
        if uri is None or (inside and not (ROOT / target).is_file()):
            return f"]({repository}/blob/main/{target}{match[2]})"
        return f"]({os.path.relpath(uri, Path(page).parent)}{match[2]})"

    return _LINK.sub(replaced, text)


def crd_page() -> str:
    """Every field of the CustomResourceDefinition."""
    crd = yaml.safe_load(
        (ROOT / "charts/cormorant/files/crds/collectorjobs.yaml").read_text()
    )
    (version,) = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    lines = [
        "# CollectorJob",
        "",
        (
            f"`apiVersion: {crd['spec']['group']}/{version['name']}`, `kind: CollectorJob`. "
            "`cormorant crd` prints the CustomResourceDefinition; `cormorant validate FILE` checks a manifest against "
            "it and against every rule below, without a cluster."
        ),
    ]
    for part in ("spec", "status"):
        fields = schema["properties"][part]
        lines += ["", f"## {part}", "", *_table(fields), *_rules(fields)]
        for name, field in fields.get("properties", {}).items():
            inner = field.get("items", field)
            if inner.get("properties"):
                lines += [
                    "",
                    f"### {part}.{name}",
                    "",
                    _cell(field.get("description", "")),
                    "",
                ]
                lines += [*_deep_table(inner), *_rules(inner)]
    return "\n".join(lines) + "\n"


def _rules(schema: Mapping[str, Any]) -> Iterator[str]:
    rules = [
        rule["message"]
        for rule in schema.get("x-kubernetes-validations", ())
        if "message" in rule
    ]
    if rules:
        yield from ("", "Rules that the API server checks:", "")
        yield from (f"- {_cell(rule)}" for rule in rules)


def _table(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (
        "| field | type | default | meaning |",
        "| --- | --- | --- | --- |",
    )
    for name, field in schema.get("properties", {}).items():
        yield _row(name, field, required=name in schema.get("required", ()))


def _deep_table(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (
        "| field | type | default | meaning |",
        "| --- | --- | --- | --- |",
    )
    yield from _rows_below(schema, "")


def _rows_below(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, field in schema.get("properties", {}).items():
        yield _row(
            f"{path}{name}", field, required=name in schema.get("required", ())
        )
        inner = field.get("items", field)
        yield from _rows_below(
            inner, f"{path}{name}{'[]' if 'items' in field else ''}."
        )


def _row(name: str, field: Mapping[str, Any], *, required: bool) -> str:
    kind = (
        field.get("type")
        or " or ".join(
            option.get("type", "") for option in field.get("anyOf", ())
        )
        or "any"
    )
    if "enum" in field:
        kind = ", ".join(f"`{value}`" for value in field["enum"])
    bounds = [
        f"{word} {field[key]}"
        for key, word in (("minimum", "at least"), ("maximum", "at most"))
        if key in field
    ]
    default = field.get("default", "**required**" if required else "")
    shown = (
        default
        if default == "**required**" or default == ""
        else f"`{yaml_word(default)}`"
    )
    return f"| `{name}` | {'; '.join((kind, *bounds))} | {shown} | {_cell(field.get('description', ''))} |"


def yaml_word(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def cli_page() -> str:
    """Every command with its arguments and options."""
    import typer

    from cormorant_cli.app import app

    lines = [
        "# Command line",
        "",
        "`kubectl cormorant ...` is the same command as a kubectl plugin.",
        "Every command takes `--json` (also: `-o json`).",
        "",
    ]
    return (
        "\n".join(
            [*lines, *_commands("cormorant", typer.main.get_command(app))]
        )
        + "\n"
    )


def _commands(path: str, command: Any) -> Iterator[str]:
    if getattr(command, "hidden", False):
        return
    below = getattr(command, "commands", {})
    if " " in path:
        yield from (f"{'##' if path.count(' ') == 1 else '###'} {path}", "")
    yield from (_plain(command.help or ""), "")
    if command.epilog and not below:
        examples = [
            line.strip()
            for line in command.epilog.splitlines()
            if line.strip().startswith("cormorant")
        ]
        yield from (
            "```console",
            *(f"$ {line}" for line in examples),
            "```",
            "",
        )
    options = [] if below else list(command.params)
    if options:
        yield from ("| argument or option | meaning |", "| --- | --- |")
        for option in options:
            if getattr(option, "hidden", False):
                continue
            is_argument = option.param_type_name == "argument"
            names = (
                ((option.metavar or option.name.upper()),)
                if is_argument
                else (*option.opts, *option.secondary_opts)
            )
            yield f"| {', '.join(f'`{name}`' for name in names)} | {_plain(option.help or '')}{_default(option)} |"
        yield ""
    for name, inner in below.items():
        yield from _commands(f"{path} {name}", inner)


def _default(option: Any) -> str:
    default = option.default
    if (
        default in (None, "", False, True, (), [])
        or callable(default)
        or not isinstance(default, str | int | float)
    ):
        return ""
    return "" if "default" in (option.help or "") else f" Default: `{default}`."


def _plain(text: str) -> str:
    return _cell(re.sub(r"\[/?[a-z]+\]", "", text))


def rest_page() -> str:
    """Every operation and schema of the head's OpenAPI document."""
    from cormorant_api.app import make_app

    document = make_app().openapi()
    lines = [
        "# REST API",
        "",
        str(document["info"]["description"]),
        "",
        (
            "`cormorant openapi` prints this as an OpenAPI document, and every head serves it at `/openapi.json`, with "
            "a page to try it at `/docs`."
        ),
    ]
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["other"])[0]
            by_tag.setdefault(tag, []).extend(
                _operation(method.upper(), path, operation)
            )
    for tag, text in by_tag.items():
        lines += ["", f"## {tag.capitalize()}", "", *text]
    lines += ["", "## Schemas", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += [f"### {name}", "", _cell(schema.get("description", "")), ""]
        if schema.get("properties"):
            lines += ["| field | type | meaning |", "| --- | --- | --- |"]
            for field, inner in schema["properties"].items():
                lines.append(
                    f"| `{field}` | {_type(inner)} | {_cell(inner.get('description', ''))} |"
                )
            lines.append("")
    return "\n".join(lines) + "\n"


def _operation(
    method: str, path: str, operation: Mapping[str, Any]
) -> Iterator[str]:
    yield from (
        f"### {method} {path}",
        "",
        operation.get("description", operation.get("summary", "")),
        "",
    )
    if operation.get("parameters"):
        yield from (
            "| parameter | in | type | meaning |",
            "| --- | --- | --- | --- |",
        )
        for given in operation["parameters"]:
            meaning = _cell(
                given.get("description", "")
                or given.get("schema", {}).get("description", "")
            )
            yield f"| `{given['name']}` | {given['in']} | {_type(given.get('schema', {}))} | {meaning} |"
        yield ""
    bodies = operation.get("requestBody", {}).get("content", {})
    for kind, content in bodies.items():
        yield from (f"Body: `{kind}`, {_type(content.get('schema', {}))}.", "")
    for status, answer in operation.get("responses", {}).items():
        kinds = ", ".join(
            f"`{kind}` {_type(c.get('schema', {}))}"
            for kind, c in answer.get("content", {}).items()
        )
        yield f"- {status}: {_cell(answer.get('description', ''))}{': ' + kinds if kinds else ''}"
    yield ""


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(_type(option) for option in schema[key])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    return str(schema.get("type", "any"))
