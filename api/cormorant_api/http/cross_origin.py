"""Cross-origin protection for a head without tokens: any web page in the user's browser could otherwise pause a job on
this machine. Programs send none of these headers, and the head's own page is same-origin.

DNS rebinding makes a foreign page same-origin for the browser; its requests carry the foreign name as Host.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

from cormorant_api.errors import ApiError
from cormorant_api.settings import is_loopback
from cormorant_contract.rest.problems import ProblemType

_OURS = frozenset({"same-origin", "none"})
"""Values of Sec-Fetch-Site. `same-site` would be another port of this machine, which may serve any page."""


def refuse_cross_origin(headers: Mapping[str, str], *, what: str) -> None:
    """Refuse a request that a browser sends for a page of another origin. `headers` have lower-case names.

    Raises:
        ApiError: 403.
    """
    site, origin = headers.get("sec-fetch-site", ""), headers.get("origin", "")
    is_other = site not in _OURS if site else bool(origin) and urlsplit(origin).netloc != headers.get("host", "")
    if is_other:
        whose = f"Origin {origin[:200]}" if origin else f"Sec-Fetch-Site {site[:20]}"
        raise ApiError(
            ProblemType.FORBIDDEN,
            f"{what} comes from a page of another site ({whose}), and this head runs without tokens; use the head's "
            "own page or a program, or start the head with tokens",
        )


def refuse_other_hosts(headers: Mapping[str, str], *, listens_on: str, what: str) -> None:
    """Refuse a request whose Host is not localhost, a loopback address or the address that the head listens on.

    Raises:
        ApiError: 403.
    """
    host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    if host in ("", listens_on) or host.endswith(".localhost") or is_loopback(host):
        return
    raise ApiError(
        ProblemType.FORBIDDEN,
        f"{what} has the Host {host[:200]!r}, and a head without tokens only serves localhost; use http://localhost, "
        "or start the head with tokens",
    )
