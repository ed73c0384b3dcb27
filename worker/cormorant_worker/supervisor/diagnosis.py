"""Whether a head answers, and why `ray start` ended, in a sentence derived from its last output."""

import socket
import threading
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal

_AUTH = ("InvalidAuthToken", "Unauthenticated", "UNAUTHENTICATED", "AuthenticationError", "Authentication failed")
_VERSION = ("Version mismatch",)
_UNREACHABLE = ("Failed to connect to GCS", "Unable to connect to GCS", "Failed to get cluster ID", "Timed out")
_LONGEST = 300
_CONNECT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    cause: Literal["token", "version", "unreachable", "ended"]
    """token and version: the same pod will fail again."""
    sentence: str


def probe_head(address: tuple[str, int], *, limit_s: float) -> str:
    """Try to connect to a head. Returns the reason for a failure, or "" on success.

    A DNS server that does not answer blocks its caller for minutes and cannot be interrupted, so the attempt runs in a
    thread that is abandoned at the limit.
    """
    answer: SimpleQueue[str] = SimpleQueue()

    def try_it() -> None:
        try:
            socket.create_connection(address, timeout=_CONNECT_S).close()
            answer.put("")
        except OSError as error:
            answer.put(str(error) or type(error).__name__)

    threading.Thread(target=try_it, name="probe-head", daemon=True).start()
    try:
        return answer.get(timeout=limit_s)
    except Empty:
        return f"no answer within {limit_s:.0f} s"


def diagnose(last_words: str, *, code: int | None, head: str, has_joined: bool) -> Diagnosis:
    """Why Ray ended.

    Args:
        last_words: the end of its output.
        code: its exit code; None: it was ended because it took too long.
        head: where the head should be.
        has_joined: it was a member of the head's cluster before.
    """
    if has_joined:
        # A raylet that meets another head than its own calls that an authentication error, too.
        return Diagnosis(
            cause="ended",
            sentence=f"Ray left the cluster of {head} (exit code {code}): its head is gone, "
            "or lost contact with this node",
        )
    lines = [line.strip() for line in last_words.splitlines()]
    if _says(last_words, _AUTH):
        return Diagnosis(
            cause="token",
            sentence=f"the head at {head} refuses this pod's token; RAY_AUTH_TOKEN must be the one in the job's "
            "Secret, and RAY_AUTH_MODE must be token in all pods; if that Secret is newer than the head, "
            "delete the head's pod",
        )
    if _says(last_words, _VERSION):
        first = next((n for n, line in enumerate(lines) if _says(line, _VERSION)), 0)
        return Diagnosis(
            cause="version",
            sentence=f"the head at {head} runs another version of Ray or Python; all pods of a job need one image: "
            f"{' '.join(lines[first : first + 4])[:_LONGEST]}",
        )
    if code is None or _says(last_words, _UNREACHABLE):
        return Diagnosis(cause="unreachable", sentence=f"the head at {head} did not let this node join in time")
    last = next((line[:_LONGEST] for line in reversed(lines) if line), "no output")
    return Diagnosis(cause="ended", sentence=f"`ray start` ended with code {code} before it joined {head}: {last}")


def _says(text: str, signs: tuple[str, ...]) -> bool:
    return any(sign in text for sign in signs)
