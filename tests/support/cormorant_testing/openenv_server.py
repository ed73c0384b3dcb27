"""A server of the real `openenv` package: `python openenv_server.py PORT SESSIONS [HOST]`.

Its observations prove which actions ran: `total` is the sum of them since the reset, and `seed` the reset's.
"""

import sys
from typing import Any, Literal

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

MOVES = ("LEFT", "STAY", "RIGHT")


class Move(Action):
    move: Literal["LEFT", "STAY", "RIGHT"]


class Seen(Observation):
    total: int = 0
    seed: int = -1
    board: list[list[int]] = Field(default_factory=lambda: [[0, 0], [0, 0]])
    message: str = ""


class Walk(Environment[Move, Seen, State]):
    """Ends after `length` steps; every other episode is cut instead."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.episodes, self.steps, self.total, self.seed, self.length = 0, 0, 0, -1, 5

    def reset(self, seed: int | None = None, episode_id: str | None = None, length: int = 5, **_: Any) -> Seen:
        self.episodes += 1
        self.steps, self.total, self.length = 0, 0, length
        self.seed = self.seed if seed is None else seed
        return self._see()

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
        self.steps += 1
        self.total += MOVES.index(action.move) - 1
        return self._see()

    def _see(self) -> Seen:
        done = self.steps >= self.length
        return Seen(
            total=self.total,
            seed=self.seed,
            board=[[self.steps, self.total], [self.episodes, 0]],
            reward=float(self.total) if self.steps else None,
            done=done,
            metadata={"truncated": done and self.episodes % 2 == 0},
        )

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


if __name__ == "__main__":
    port, sessions, *host = sys.argv[1:]
    app = create_fastapi_app(Walk, Move, Seen, max_concurrent_envs=int(sessions))
    uvicorn.run(app, host=host[0] if host else "127.0.0.1", port=int(port), log_level="warning")
