"""Server-sent events: parsed, and gone on with after a break."""

import http.client
import json
from collections.abc import Iterator

from cormorant_client.errors import HeadUnreachable, error_for
from cormorant_client.head import HeadConnection
from cormorant_client.transport import Broken
from cormorant_contract.rest.events import Event
from cormorant_contract.rest.live import Opening

_PATH, _LIVE = "/v1/events", "/v1/live"


def read_events(head: HeadConnection, *, last_id: str = "") -> Iterator[Event]:
    """Yield events until the head is closed here. A broken connection is opened again after the last event seen.

    Raises:
        HeadUnreachable: the head was unreachable for longer than `reconnect_s`, or is closed.
        HeadError: the head refuses.
    """
    patience = head.patience(head.reconnect_s)
    while True:
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_id} if last_id else {})}
        try:
            with head.stream(_PATH, headers) as response:
                if response.status != 200:
                    raise error_for(response.status, response.read(), where=f"GET {_PATH}")
                for event in parse_events(response):
                    patience = head.patience(head.reconnect_s)
                    last_id = event.id
                    yield event
            reason = "the stream ended"
        except Broken as error:
            reason = str(error)
        if not patience.wait(reason):
            raise HeadUnreachable(f"lost the event stream of {head.address} and could not reconnect: {reason}")


def read_opening(head: HeadConnection) -> Opening:
    """What a page is shown first.

    Raises:
        HeadUnreachable: the connection broke off.
        HeadError: the head refuses.
    """
    kind = b""
    try:
        with head.stream(_LIVE, {"Accept": "text/event-stream"}) as response:
            if response.status != 200:
                raise error_for(response.status, response.read(), where=f"GET {_LIVE}")
            for line in response:
                name, _, value = line.partition(b": ")
                if name == b"data" and kind == b"opening":
                    return Opening.model_validate_json(value)
                kind = value.strip() if name == b"event" else kind
    except Broken as error:
        raise HeadUnreachable(f"lost the connection to {head.address}: {error}") from error
    raise HeadUnreachable(f"the head at {head.address} closed the stream; retry")


def parse_events(lines: "http.client.HTTPResponse | Iterator[bytes]") -> Iterator[Event]:
    """Read `id:` and `data:` lines; comments and other fields are left out: the data says the kind."""
    data: list[str] = []
    last_id = ""
    for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
        elif name == "id":
            last_id = value.removeprefix(" ")
        elif not line and data:
            yield Event.model_validate({"id": last_id, **json.loads("\n".join(data))})
            data = []
