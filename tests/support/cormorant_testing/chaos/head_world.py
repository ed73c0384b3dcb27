"""A schedule through a real head: a process of its own, asked over HTTP, its batches read by the client."""

import signal
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from cormorant_client import BatchGone, connect
from cormorant_testing.chaos.judge import Finding, Judge, compare
from cormorant_testing.chaos.plan import Plan
from cormorant_testing.chaos.world import CONTROL_S, LIMIT_S, SmallDisk, Watch, World, within
from cormorant_testing.heads import HeadProcess
from cormorant_testing.scripts import start_script, unused_port
from cormorant_testing.serving import SAFETENSORS, Reply, weights_file

ACK_WITHIN_S = 2.0
START_S = 300.0
WEIGHTS = "/v1/models/policy/weights"

EATER = """
import sys, time
from cormorant_client import connect
with connect(sys.argv[1], token=sys.argv[2]) as client:
    with client.deliveries(consumer="eater", memory=sys.argv[3]) as batches:
        next(batches)
        print("took", flush=True)
        time.sleep(600)
"""


class Consumer(threading.Thread):
    """Reads batches with the client until it is closed."""

    def __init__(self, name: str, url: str, token: str, plan: Plan, judge: Judge) -> None:
        super().__init__(name=name, daemon=True)
        memory = "auto" if plan.maps else "never"
        self._client = connect(url, token=token, reconnect_s=START_S)
        self._batches = self._client.deliveries(consumer=name, prefetch=1, memory=memory)
        self._judge = judge
        self.holds_s = 0.0
        """For how long it keeps the batch that comes next."""
        self.error: BaseException | None = None
        self.is_closed = False

    def run(self) -> None:
        try:
            for batch in self._batches:
                self._judge.take(batch.numpy(), batch_id=batch.id)
                if self.holds_s:
                    holds_s, self.holds_s = self.holds_s, 0.0
                    self._hold(batch, holds_s)
        except BaseException as error:  # noqa: BLE001  # the thread's edge: raised by `check`
            if not self.is_closed:
                self.error = error

    def _hold(self, batch: Any, seconds: float) -> None:
        # Not `numpy()`: what it has put together once, it does not look at again.
        before = [{name: array.copy() for name, array in part.arrays.items()} for part in batch.parts]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.is_closed:
            time.sleep(0.1)
            try:
                batch.numpy()
            except BatchGone:
                return  # said, not silent
            for kept, part in zip(before, batch.parts, strict=True):
                compare(kept, part.arrays, f"{batch!r} changed while it was read")

    def close(self) -> None:
        self.is_closed = True
        within(LIMIT_S, "closing a consumer", self._batches.close)
        self._client.close()


class ChaosHead(HeadProcess):
    wait_s = START_S


class HeadWorld(World):
    """One head, two consumers, and what happens to them."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan)
        self._folder = folder
        self._directory = folder / "head"
        self._directory.mkdir()
        self._disk = SmallDisk(self._directory) if plan.theme in ("disk", "mixed") else None
        self._manifest = folder / "job.yaml"
        self._manifest.write_text(yaml.safe_dump(plan.job().to_document()))
        self._ports = unused_port(), unused_port()
        self._eaters: list[subprocess.Popen[str]] = []
        self.head: ChaosHead
        self._is_away = True
        self._open, self._watches = ExitStack(), list[Watch]()
        self._consumers: list[Consumer] = []

    # -- life --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._start_head()
        for path in ("/livez", "/v1/status"):
            self._watches.append(self._open.enter_context(Watch(path, partial(self._look, path))))
        self._consumers = [self._consumer(f"consumer-{i}") for i in range(2)]

    def _start_head(self) -> None:
        options = {"--fleet": self._plan.engine, "--workers": self._plan.workers, "--ack-within": ACK_WITHIN_S}
        options |= {"--port": self._ports[0], "--data-port": self._ports[1], "--linger-seconds": 0.2}
        words = [str(word) for option in options.items() for word in option]
        module = ("cormorant_testing.chaos.head",)
        self.head = ChaosHead(self._manifest, self._directory, *words, "--drain-seconds", "5", module=module)
        self._open.callback(self._end_head, self.head)
        self.api = self.head.api()
        self._token = self.api.token
        self._is_away = False

    def _consumer(self, name: str) -> Consumer:
        consumer = Consumer(name, f"http://127.0.0.1:{self._ports[0]}", self._token, self._plan, self.judge)
        consumer.start()
        return consumer

    def _look(self, path: str) -> None:
        if self._is_away:
            return
        try:
            reply = self.api.call("GET", path, timeout=LIMIT_S)
        except OSError as error:
            if not self._is_away:
                raise Finding(f"{path} cannot be asked: {error}") from error
            return
        if reply.status != 200 and not self._is_away:
            raise Finding(f"{path}: {reply.status} {reply.body[:500]!r}")

    def check(self) -> None:
        for watch in self._watches:
            watch.check()
        for consumer in self._consumers:
            if consumer.error is not None:
                raise consumer.error
        if not self._is_away and self.head.process.poll() is not None:
            raise Finding(f"the head ended with {self.head.process.returncode}")

    def how_it_stands(self) -> str:
        """What it answers, if it does, and the last lines of its log, with its threads' stacks."""
        told = []
        if self.head.process.poll() is None:
            with suppress(OSError):
                told = [repr(self.api.call("GET", path, timeout=10).body) for path in ("/v1/status", "/v1/workers")]
            self.head.process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
        return "\n".join([*told, *self.head.text.splitlines()[-100:]])

    def _calm(self) -> None:
        if self._plan.thaws:
            self._thaw()
        for lease in self._get("/v1/pauses").json["leases"]:
            self._ask("DELETE", f"/v1/pauses/{lease['id']}")
        self._until("the fleet runs again", lambda: self._get("/v1/status").json["pause_state"] == "running")
        update: dict[str, Any] = {}

        def is_applied() -> bool:
            if not update:
                reply = self._publish(0.0)
                update.update(reply.json if reply.status in (200, 202) else {})
                return False
            return bool(self._get(f"/v1/updates/{update['update_id']}").json["state"] == "applied")

        self._until("new weights act everywhere", is_applied)
        version = self._version
        self._until(f"frames of version {version} are delivered", lambda: self.judge.newest >= version)

    def _end(self) -> None:
        self._ask("POST", "/v1/pauses", {"owner": "end", "ttl_seconds": 600, "wait_seconds": 30})
        self._until("the fleet pauses", lambda: self._get("/v1/status").json["pause_state"] == "paused")
        queue = {"waiting": 1}

        def is_empty() -> bool:
            queue.update(self._get("/v1/status").json["queue"])
            return not any(queue[name] for name in ("waiting", "ready", "lent"))

        self._until("consumers have all that was collected", is_empty)
        self.check()
        for consumer in self._consumers:
            consumer.close()
        self.check()
        self.judge.finish()
        self._is_away = True
        self.head.process.send_signal(signal.SIGTERM)
        self.head.process.wait(LIMIT_S)

    def clean_up(self) -> None:
        self._is_away = True
        self._thaw()
        for consumer in self._consumers:
            consumer.is_closed = True
        for eater in self._eaters:
            eater.kill()
            eater.communicate()
        self._open.close()
        if self._disk is not None:
            self._disk.close()

    def _end_head(self, head: ChaosHead) -> None:
        below = []
        with suppress(psutil.Error):
            if head.process.poll() is None:  # another process may have the number of one that ended
                below = psutil.Process(head.process.pid).children(recursive=True)
        head.process.kill()
        head.wait(20)
        for process in below:
            with suppress(psutil.Error):
                process.kill()
        head.close()

    # -- what happens ------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, document: Any = None, *, also: tuple[int, ...] = ()) -> Reply:
        """Ask the head. Refusals with a reason are answers; a failure of the head is a finding."""
        headers = {"Content_Type": SAFETENSORS} if isinstance(document, bytes) else {}
        call = partial(self.api.call, method, path, document, timeout=LIMIT_S * 2, **headers)
        reply = within(LIMIT_S * 3, f"{method} {path}", call)
        allowed = {200, 201, 202, 204, 503, 504, *also} | ({507} if self._is_full else set())
        if reply.status not in allowed:
            raise Finding(f"{method} {path}: {reply.status} {reply.body[:500]!r}")
        return reply

    def _get(self, path: str) -> Reply:
        return self._ask("GET", path)

    def _pids(self) -> list[int]:
        return [worker["pid"] for worker in self._get("/v1/workers").json["workers"] if worker["pid"]]

    def _publish(self, amount: float) -> Reply:
        self._version += 1
        return self._ask("PUT", f"{WEIGHTS}?version={self._version}", weights_file(self._version))

    def _lease(self, amount: float) -> None:
        """Short: it ends by itself, perhaps before every worker has stopped."""
        wait = {"wait_seconds": 0.1 + amount, "ttl_seconds": 0.2 + 6 * amount}
        self._ask("POST", "/v1/pauses", {"owner": f"lease-{amount:.3f}", **wait})
        if self._frozen and amount > 0.3:
            time.sleep(CONTROL_S + 1)  # the pause gives up on the frozen worker

    def _resize(self, amount: float) -> None:
        self._ask("PUT", "/v1/desired", {"groups": {"cpu": 1 + int(6 * amount)}})

    def _cycle(self, amount: float) -> None:
        """Down to one and up again: more attempts at a place, without a failure."""
        for workers in (1, 3):
            self._ask("PUT", "/v1/desired", {"groups": {"cpu": workers}})
            size = workers + self._plan.servers
            self._until(f"{size} workers", lambda n=size: len(self._pids()) == n)  # type: ignore[misc]  # bound now
        before = self.judge.frames
        self._until("frames of the new workers", lambda: self.judge.frames > before + 300)

    def _save(self, amount: float) -> None:
        reply = self._ask("GET", "/v1/state", also=(422,))
        if reply.status == 200:
            self._saved = reply.body

    def _restore(self, amount: float) -> None:
        if not self._saved:
            self._save(amount)
        if not self._saved:
            return
        self.judge.may_miss = True
        self._ask("POST", "/v1/pauses", {"owner": "restore", "ttl_seconds": 60, "wait_seconds": 10})
        # 409: a worker is frozen, it is not paused yet; 422: the workers are not those of the state.
        self._ask("PUT", "/v1/state", self._saved, also=(409, 422))
        self._ask("POST", "/v1/resume", {"owner": "restore"})

    def _seed(self, amount: float) -> None:
        self._seeds += 1
        self.judge.may_miss = True
        self._ask("POST", "/v1/seed", {"seed": self._seeds})

    def _hold(self, amount: float) -> None:
        """A consumer learns from a batch for longer than it has."""
        self._consumers[0].holds_s = ACK_WITHIN_S * (1 + 1.5 * amount)
        time.sleep(ACK_WITHIN_S * (1 + 1.5 * amount))

    def _eater(self, amount: float) -> None:
        """A consumer takes batches, and is killed."""
        memory = "auto" if self._plan.maps else "never"
        url = f"http://127.0.0.1:{self._ports[0]}"
        eater = start_script(EATER, url, self._token, memory)
        self._eaters.append(eater)
        assert eater.stdout is not None
        within(self._calm_s, "a consumer's first batch", eater.stdout.readline)
        time.sleep(amount)
        eater.kill()

    def _freeze_head(self, amount: float) -> None:
        """The head is frozen; it blames no worker for it."""
        self.head.process.send_signal(signal.SIGSTOP)
        time.sleep(1 + 11 * amount)
        self.head.process.send_signal(signal.SIGCONT)

    def _kill_head(self, amount: float) -> None:
        self._thaw()
        self._is_away = self.judge.may_miss = True
        self.head.kill()
        self._start_head()

    def _fill_disk(self, amount: float) -> None:
        assert self._disk is not None
        self._disk.fill()
        self._is_full = True
        try:
            for _ in range(3):
                self._publish(amount)
                time.sleep(amount)
                self.check()
        finally:
            self._disk.free()
            self._is_full = False
