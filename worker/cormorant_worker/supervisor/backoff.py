"""How long to wait before Ray is started again. Pure."""

_FIRST_S = 0.2
_LONGEST_S = 5.0
_HEALTHY_S = 10.0


class Backoff:
    """0.4, 0.8, 1.6 ... 5 s; 0.2 s after a membership of ten seconds or more, and from the beginning again."""

    def __init__(self) -> None:
        self._failures = 0

    def next_s(self, *, joined_s: float) -> float:
        """Seconds until the next start. `joined_s`: how long the node was a member this time; 0: it never was."""
        self._failures = 0 if joined_s >= _HEALTHY_S else self._failures + 1
        return min(_LONGEST_S, _FIRST_S * 2.0 ** min(self._failures, 16))
