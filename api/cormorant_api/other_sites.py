"""Requests that a browser sends for a page of another site. Where no token is asked for, any page that its user looks
at could pause a job of this machine; programs send none of these headers, and the head's own page comes from here.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

from cormorant_api.errors import ApiError
from cormorant_contract.rest.problems import ProblemType

_OURS = frozenset({"same-origin", "none"})
"""Of Sec-Fetch-Site. `same-site` is another port of this machine: whose page that is, nobody knows."""


def refuse_other_sites(headers: Mapping[str, str], *, what: str) -> None:
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
