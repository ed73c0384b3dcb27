"""Mutants by hand: each changes one line, and the tests beside it must notice. `python tests/mutation/run.py [word]`.

A mutant whose text is not found, or that no test notices, is an error. It changes files of the working tree one after
the other and puts each back.
"""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    file: str
    before: str
    after: str
    tests: str


ROWS: dict[tuple[str, str], list[tuple[str, str, str, str]]] = {
    ("operator/cormorant_operator", "tests/unit/operator"): [
        ("job.py", "self._code, *secret)", "*secret)", "test_job.py"),
        ("job.py", "group.resources, group.template)", "group.template)", "test_job.py"),
        ("job.py", "spec.image, self._code, spec.head", "spec.image, spec.head", "test_job.py"),
        ("kube/watch.py", "not any(task.done() for task in streams)", "True", "test_kube.py"),
        ("kube/watch.py", 'if event["type"] is None:', "if False:", "tests/integration/operator/test_head_client.py"),
        ("controller.py", "now() - state.remade_at >= _REMAKE_S", "False", "test_controller.py"),
        ("cache.py", "if version <= self._tombstones.get(uid, -1):", "if False:", "test_cache.py"),
        ("work_queue.py", "2.0 ** min(count - 1, 20)", "1.0", "test_kube.py"),
        ("kube/leader.py", "if holder and not is_renewal and", "if False and", "test_kube.py"),
        ("pods.py", "if pod.is_rejected:", "if False:", ""),
    ],
    ("api/cormorant_client", "tests/unit/client"): [
        ("transport.py", "parts.username or ", "", "test_head.py"),
        ("transport.py", "parts.password or ", "", "test_head.py"),
        ("transport.py", "is_reusable and not self.closed.is_set() and ", "is_reusable and ", "test_head.py"),
    ],
    ("api/cormorant_api", "tests/unit/api"): [
        ("ledger.py", " and entry.delivery == delivery", "", "test_ledger.py"),
        ("ledger.py", "number < 0 or number in self._returned:", "number < 0:", "test_ledger.py"),
        ("ledger.py", "not entry.senders and not entry.is_read()", "not entry.senders", "test_ledger.py"),
        ("ledger.py", "0 <= entry.loan.min_version", "entry.loan.min_version", "test_ledger.py"),
        ("control/leases.py", " and lease.deadline > now), None", "), None", "test_ledger.py"),
        ("control/leases.py", "if self._is_paused is False else", "if not self._is_paused else", "test_ledger.py"),
        ("control/journal.py", "max(self.settled_frames, frames)", "frames", "test_journal.py"),
        ("http/tokens.py", "if role < needed:", "if False:", "test_refusals.py"),
        ("http/tokens.py", "if mode & 0o007:", "if False:", "test_refusals.py"),
        ("http/tokens.py", "len(set(tokens.values())) != len(tokens)", "False", "test_refusals.py"),
    ],
    ("api/cormorant_contract", "tests/unit/contract"): [
        ("tensor_file.py", "if entry.begin != at:", "if entry.begin < at:", "test_tensor_file.py"),
        ("tensor_file.py", "if key in names:", "if False:", "test_tensor_file.py"),
        ("tensor_file.py", "if end - begin != wanted:", "if False:", "test_tensor_file.py"),
    ],
    ("api/cormorant_postproc", "tests/unit/postproc"): [
        ("steps.py", "clamp_max(self.n_steps - 1)", "clamp_max(self.n_steps)", "test_postproc.py"),
        ("steps.py", "may if valid is None else may & valid", "may", "test_postproc.py"),
        ("steps.py", "lengths.nonzero().flatten().tolist()", "range(len(lengths))", "test_postproc.py"),
    ],
    ("worker/cormorant_worker", "tests/unit/worker"): [
        ("fleet/scheduler.py", " - _ROUNDING)", ")", "test_scheduler.py"),
        ("fleet/scheduler.py", 'self.mode == "sync" and any(', "False and any(", "test_scheduler.py"),
        ("fleet/scheduler.py", "(round_.is_preempted or not only_preempted)", "True", "test_scheduler.py"),
        ("fleet/scheduler.py", "share + (i < rest)", "share", "test_scheduler.py"),
        ("fleet/slots.py", "self.epoch = saved.epoch + 1", "self.epoch = saved.epoch", "test_slots.py"),
        ("fleet/slots.py", "max(slot.attempt + 1, first_free)", "slot.attempt + 1", "test_slots.py"),
        ("fleet/offers.py", "one.version > handle.offered", "one.version >= handle.offered", "test_slots.py"),
        ("weights/staged.py", "if version <= newest:", "if version < newest:", "test_weights.py"),
        ("weights/staged.py", "{**(self._offered or {}), **weights}", "weights", "test_weights.py"),
        ("weights/cached.py", "if settled.frames <= self._newest_settled:", "if False:", "test_weights.py"),
        ("weights/cached.py", '_digest(file) != header["digest"]', "False", "test_weights.py"),
        ("normalize.py", "self.count < 2 else np.sqrt", "self.count < 1 else np.sqrt", "test_normalize.py"),
        ("envs/restarts.py", "not in self._used:", "is not None:", "envs"),
        ("envs/restarts.py", "1 if crash.steps else self._barren[row] + 1", "1", "envs"),
        ("sinks/verify.py", "if found != noted:", "if False:", "sinks/test_shards.py"),
        ("sinks/verify.py", "if counted != noted:", "if False:", "sinks/test_shards.py"),
        ("sinks/shards.py", "min(shard.min_version, ", "max(shard.min_version, ", "sinks/test_shards.py"),
        ("collect/trajectories.py", "max(self.next_id, base)", "base", "test_state.py"),
        ("collect/place.py", "seed ^ other", "seed", "test_slots.py"),
        ("inference/server.py", "weights.version < needed and not", "False and not", "test_inference_server.py"),
        ("fleet/hang_detector.py", ", _LONGEST_TURN_S)", ", 1e9)", "test_slots.py"),
        ("fleet/hang_detector.py", "_TIMES_LONGER * handle", "handle", "test_slots.py"),
    ],
}
"""By package and folder of its tests: file, text, what it becomes, and the tests that notice; of elsewhere by path."""
MUTANTS = [
    Mutant(f"{package}/{file}", before, after, tests if tests.startswith("tests/") else f"{folder}/{tests}")
    for (package, folder), rows in ROWS.items()
    for file, before, after, tests in rows
]


def survives(mutant: Mutant) -> bool:
    path = ROOT / mutant.file
    text = path.read_text()
    assert text.count(mutant.before) == 1, f"{mutant.file} does not have exactly once: {mutant.before}"
    path.write_text(text.replace(mutant.before, mutant.after))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", mutant.tests]
        return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=900).returncode != 1
    finally:
        path.write_text(text)


if __name__ == "__main__":
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    survivors = [mutant for mutant in MUTANTS if word in mutant.file and survives(mutant)]
    sys.exit("\n".join(f"no test notices: {m.file}: {m.before!r} -> {m.after!r}" for m in survivors) or 0)
