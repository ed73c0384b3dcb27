"""Which requests a head without tokens takes for a page of another site."""

import pytest

from cormorant_api.errors import ApiError
from cormorant_api.routes.routing import refuse_cross_origin, refuse_other_hosts

HOST = {"host": "127.0.0.1:8000"}


@pytest.mark.parametrize(
    ("headers", "whose"),
    [
        ({}, ""),  # a program
        ({"origin": "http://127.0.0.1:8000"}, ""),  # an old browser on our page
        ({"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}, ""),
        ({"sec-fetch-site": "none"}, ""),  # typed by hand
        ({"origin": "https://example.org"}, "Origin https://example.org"),
        ({"origin": "http://127.0.0.1:3000"}, "Origin http://127.0.0.1:3000"),
        ({"origin": "http://127.0.0.1:3000", "sec-fetch-site": "same-site"}, "Origin http://127.0.0.1:3000"),
        ({"origin": "null"}, "Origin null"),
        ({"sec-fetch-site": "cross-site"}, "Sec-Fetch-Site cross-site"),
        ({"origin": "http://127.0.0.1:8000", "sec-fetch-site": "cross-site"}, "Origin http://127.0.0.1:8000"),
    ],
)
def test_pages_of_others_are_refused_with_a_sentence(headers: dict[str, str], whose: str) -> None:
    if not whose:
        refuse_cross_origin(HOST | headers, what="POST /v1/pause")
        return
    with pytest.raises(ApiError) as refused:
        refuse_cross_origin(HOST | headers, what="POST /v1/pause")
    assert refused.value.status == 403
    assert refused.value.detail == (
        f"POST /v1/pause comes from a page of another site ({whose}), and this head runs without tokens; use the "
        "head's own page or a program, or start the head with tokens"
    )


@pytest.mark.parametrize(
    "host", ["", "localhost", "localhost:8000", "job.localhost:8000", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "lo"]
)
def test_names_of_this_machine_pass(host: str) -> None:
    refuse_other_hosts({"host": host}, listens_on="lo", what="GET /v1/status")


@pytest.mark.parametrize("host", ["rebound.example:8000", "10.0.0.1", "localhost.example.org", "[::2]:8000"])
def test_a_name_that_was_made_to_lead_here_is_refused(host: str) -> None:
    with pytest.raises(ApiError, match="http://localhost, or start the head with tokens") as refused:
        refuse_other_hosts({"host": host}, listens_on="127.0.0.1", what="GET /v1/status")
    assert refused.value.status == 403
