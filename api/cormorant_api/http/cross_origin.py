"""Requests that a browser sends for a page of another site. Where no token is asked for, any page that its user looks
at could pause a job of this machine; programs send none of these headers, and the head's own page comes from here.

A page whose own name was made to lead to this machine (DNS rebinding) is of the same origin for the browser: its
requests carry that name as Host.
"""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from cormorant_api.errors import ApiError
from cormorant_contract.rest.problems import ProblemType

_OURS = frozenset({"same-origin", "none"})
"""Of Sec-Fetch-Site. `same-site` is another port of this machine: whose page that is, nobody knows."""


def refuse_cross_origin(headers: Mapping[str, str], *, what: str) -> None:
    """Let a request pass unless a browser says that another origin's page sends it.

    Args:
        headers: of the request, by lower-case names.
        what: the request, for the sentence.

    Raises:
        ApiError: 403.
    """
    site, origin = headers.get("sec-fetch-site", ""), headers.get("origin", "")
    is_other = site not in _OURS if site else bool(origin) and urlsplit(origin).netloc != headers.get("host", "")
    if is_other:
        whose = f"Origin {origin[:200]}" if origin else f"Sec-Fetch-Site {site[:20]}"
        raise ApiError(
            403,
            ProblemType.FORBIDDEN,
            f"{what} comes from a page of another site ({whose}), and this head asks for no token; use the head's own "
            "page or a program, or start the head with tokens",
        )


def refuse_other_hosts(headers: Mapping[str, str], *, listens_on: str, what: str) -> None:
    """Let a request pass that names this machine as its users do: localhost, a loopback address, or what the head
    listens on.

    Raises:
        ApiError: 403.
    """
    host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    if host in ("", "localhost", listens_on) or host.endswith(".localhost") or _is_loopback(host):
        return
    raise ApiError(
        403,
        ProblemType.FORBIDDEN,
        f"{what} asks for the host {host[:200]!r}, and this head asks for no token and answers to localhost alone; use "
        "http://localhost, or start the head with tokens",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
