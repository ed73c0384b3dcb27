"""Workers that answer at once, behind the seam of the engines: what is left is the fleet's own work."""

from collections import deque
from collections.abc import Sequence

import gymnasium
import numpy as np

from cormorant_contract.job import CollectorJob
from cormorant_contract.metrics.labels import ACTIVITIES
from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.timing import BatchTiming
from cormorant_worker.collect.trajectories import Episodes
from cormorant_worker.fleet.connections import Waker
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.transport import Payload, Source
from cormorant_worker.spaces import Leaf
from cormorant_worker.weights.cached import Offer
from cormorant_worker.weights.staged import TensorSpec
from cormorant_worker.wire import SharedMemory
from cormorant_worker.worker.heartbeat import Phase
from cormorant_worker.worker.messages import (
    Applied,
    Begin,
    Finish,
    Finished,
    Ready,
    Reply,
    Request,
    Sealed,
    Start,
    Ticket,
)

OBSERVATION = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
ACTION = gymnasium.spaces.Discrete(2)
SPECS = {"policy": {"weight": TensorSpec(shape=(64, 64), dtype="float32")}}
LAYOUT = Layout(
    num_rows=1,
    num_envs=1,
    observation=(Leaf(key=("observation",), shape=(4,), dtype=np.dtype(np.float32)),),
    action=(Leaf(key=("action",), shape=(), dtype=np.dtype(np.int64)),),
)
_TIMING = BatchTiming(seconds=0.1, env_step_s=0.001, inference_s=0.001)


class InstantConnection:
    """A worker whose every answer is there before it was asked, except that the fleet has to come and get it."""

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self.pid = 1 + place.index
        self.phase = Phase.WAITING
        self.frames = 0
        self.spent_ns = (0,) * len(ACTIVITIES)
        self.is_open = True
        self.version = 0
        self._news = Waker()
        self._said: deque[object] = deque()
        self._say(Ready(layout=LAYOUT, observation_space=OBSERVATION, action_space=ACTION, specs=SPECS, num_threads=1))

    def _say(self, *messages: object) -> None:
        self._said.extend(messages)
        self._news.wake()

    def sources(self) -> Sequence[Source]:
        return (self._news,)

    def receive(self, source: Source) -> Sequence[object]:
        self._news.clear()
        said = tuple(self._said)
        self._said.clear()
        return said

    def flush(self) -> Sequence[Source]:
        return ()

    def send(self, message: object, memory: SharedMemory | None = None) -> None:
        match message:
            case Finish():
                self._say(Finished())
                self.is_open = False
            case Ticket():
                self._collect(message)
            case _:
                assert isinstance(message, Begin), message

    def ask(self, request: Request, payload: Payload | None) -> None:
        self._say(Reply(number=request.number))
        if isinstance(request.command, Offer):
            self.version = request.command.version
            self._say(Applied(version=self.version))

    def _collect(self, ticket: Ticket) -> None:
        self.frames += ticket.num_frames
        self._say(
            Sealed(
                number=ticket.number,
                num_frames=ticket.num_frames,
                num_rows=1,
                min_version=self.version,
                max_version=self.version,
                episodes=Episodes(returns=[1.0], lengths=[1], num_terminated=1),
                timing=_TIMING,
            )
        )

    def describe_doing(self) -> str:
        return "waiting"

    def describe_end(self) -> str:
        return "ended"

    def kill(self) -> None:
        self.is_open = False

    def close(self) -> None:
        self.is_open = False
        self._news.close()


class InstantBlocks:
    """As many batches as are asked for, all of them the same."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_made = 0
        self._free: list[int] = []
        self._block = Block(LAYOUT)

    def resize(self, limit: int, *, at_least: int) -> None:
        self.limit = limit

    @property
    def room(self) -> int:
        return len(self._free) + self.limit - self.num_made

    def lend(self) -> int:
        if self._free:
            return self._free.pop()
        self.num_made += 1
        return self.num_made - 1

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def block(self, slot: int) -> Block:
        return self._block

    def memory(self, slot: int) -> SharedMemory | None:
        return None

    def close(self) -> None:
        pass


class InstantEngine:
    """Starts such workers."""

    descriptors_each = 1

    def complete(self, job: CollectorJob, options: FleetOptions) -> FleetOptions:
        return options

    def start(self, start: Start) -> InstantConnection:
        return InstantConnection(start.place)

    def device_of(self, device: str, number: int) -> str:
        return device

    def cpus_for(self, num_workers: int) -> int:
        return 1

    def make_blocks(self, layout: Layout, limit: int) -> InstantBlocks:
        return InstantBlocks(limit)

    def share(self, data: bytes | memoryview | SharedMemory) -> Payload:
        return data

    def close(self) -> None:
        pass
