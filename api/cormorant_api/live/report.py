"""The report of a run: the live page with its data, in one file that needs no head. Imports no server: `cormorant
report` builds one from a running head's answers.
"""

import base64
import json
import re
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

_KINDS = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY = "default-src 'none'; script-src data: 'unsafe-inline'; style-src data:; img-src data:"
_PACKAGES = ("cormorant", "torch", "tensordict", "gymnasium", "envpool", "ray")


def make_report(opening: str, *, state: str = "", reason: str = "", versions: dict[str, str] | None = None) -> str:
    """The report as HTML.

    Args:
        opening: an `Opening`, as JSON.
        state: how the job ended: Completed, Stopped or Failed; empty while it runs.
        versions: package versions by name (default: of the packages installed here).
    """
    if versions is None:
        versions = {}
        for name in _PACKAGES:
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
    page = files("cormorant_api.live") / "page"
    # A module in a data URL cannot import others by path: an import map names them.
    texts = {path.name: re.sub(r' from "\./', ' from "page/', path.read_text("utf-8")) for path in page.iterdir()}
    html = texts.pop("index.html")
    urls = {
        name: f"data:{_KINDS[name.rpartition('.')[2]]};base64,{base64.b64encode(text.encode()).decode()}"
        for name, text in texts.items()
    }
    imports = {"imports": {f"page/{name}": url for name, url in urls.items() if name.endswith(".js")}}
    data = {
        "opening": json.loads(opening),
        "state": state,
        "reason": reason,
        "versions": versions,
        "made_at": datetime.now(UTC).isoformat(),
    }
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<script type="importmap">{json.dumps(imports)}</script>\n'
        # No text of the job can close the script element.
        f'<script type="application/json" id="report">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>\n'
    )
    html = re.sub(r'"page/([a-z]+\.[a-z]+)"', lambda found: f'"{urls[found[1]]}"', html)
    return html.replace('<link rel="icon"', f'{head}<link rel="icon"', 1)
