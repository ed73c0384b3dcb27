"""A clock that a test moves by hand."""

from dataclasses import dataclass


@dataclass
class Clock:
    now: float = 0.0
    """Seconds."""

    def __call__(self) -> float:
        return self.now
