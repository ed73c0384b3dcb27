"""Small values that a learner keeps at the head, each for one policy version.

client.publish(policy, annotations={"learner": json.dumps({"updates": 7, "optimizer": "s3://..."}).encode()})

weights = client.weights()                                            # after a crash
state = client.annotations.get("learner", version=weights.version)    # stored with these weights, or before them
"""

from dataclasses import dataclass

from cormorant_client.errors import NotFound
from cormorant_client.head import Head, quoted
from cormorant_contract.rest import annotations as rest
from cormorant_contract.rest.headers import POLICY_VERSION
from cormorant_contract.rest.problems import ProblemType


@dataclass(frozen=True, slots=True)
class Annotation:
    """A value as the head has it."""

    key: str
    value: bytes
    version: int
    """Policy version that it belongs to."""
    etag: str
    """For `if_match`."""


class Annotations:
    """Values of one head, by key: letters, digits, `.`, `_`, `-`. The head keeps them with its weights, on its volume
    if it has one.
    """

    def __init__(self, head: Head) -> None:
        self._head = head

    def get(self, key: str, *, version: int | None = None) -> Annotation | None:
        """A value; None: there is none.

        Args:
            version: of this policy version, or of the highest one below it (None: the newest, which may belong to a
                version that was not published yet).
        """
        try:
            reply = self._head.send("GET", _path(key), params={"version": version})
        except NotFound as error:
            if error.kind == ProblemType.UNKNOWN_ANNOTATION:
                return None
            raise
        belongs_to = int(reply.headers[POLICY_VERSION.lower()])
        return Annotation(key, bytes(reply.body), belongs_to, reply.headers["etag"])

    def put(self, key: str, value: bytes, *, version: int | None = None, if_match: str = "") -> rest.AnnotationEntry:
        """Store a value, durably where the head has a volume. Repeating it is safe.

        Args:
            value: at most 1 MiB.
            version: policy version that it belongs to (None: the newest published one).
            if_match: the ETag that the newest value must have; empty: whatever it is.

        Raises:
            Conflict: `if_match` does not hold; there are too many values; `version` is older than all that are kept.
            Refused: the value is too long, or the key has other characters.
        """
        conditions = {"If-Match": if_match} if if_match else {}
        kind = {"Content-Type": "application/octet-stream", **conditions}
        reply = self._head.send("PUT", _path(key), params={"version": version}, headers=kind, body=[value])
        return self._head.parse(rest.AnnotationEntry, reply)

    def delete(self, key: str, *, if_match: str = "") -> None:
        """Remove every value of a key.

        Raises:
            NotFound: there is none.
            Conflict: `if_match` does not hold.
        """
        try:
            self._head.send("DELETE", _path(key), headers={"If-Match": if_match} if if_match else {})
        except NotFound as error:
            if not error.is_of_repetition:  # else the head did it before the connection broke
                raise

    def list(self) -> tuple[rest.AnnotationEntry, ...]:
        """The newest value of every key, without its bytes."""
        return self._head.get(rest.AnnotationList, "/v1/annotations").annotations


def _path(key: str) -> str:
    return f"/v1/annotations/{quoted(key)}"
