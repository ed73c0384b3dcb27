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


OPERATOR, UNIT = "operator/cormorant_operator", "tests/unit/operator"
MUTANTS = [
    Mutant(f"{OPERATOR}/templates.py", "self._code, *secret)", "*secret)", f"{UNIT}/test_templates.py"),
    Mutant(
        f"{OPERATOR}/templates.py", "group.resources, group.template)", "group.template)", f"{UNIT}/test_templates.py"
    ),
    Mutant(
        f"{OPERATOR}/templates.py",
        "spec.image, self._code, spec.head",
        "spec.image, spec.head",
        f"{UNIT}/test_templates.py",
    ),
    Mutant(f"{OPERATOR}/kube/watch.py", "not any(task.done() for task in streams)", "True", f"{UNIT}/test_watch.py"),
    Mutant(
        f"{OPERATOR}/kube/watch.py",
        'if event["type"] is None:',
        "if False:",
        "tests/integration/operator/test_watch.py",
    ),
    Mutant(
        f"{OPERATOR}/controller.py",
        "            if state.is_token_refused:\n                # A",
        "            if True:\n                # A",
        f"{UNIT}/test_controller.py",
    ),
    Mutant(
        f"{OPERATOR}/cache.py", "if version <= self._tombstones.get(uid, -1):", "if False:", f"{UNIT}/test_cache.py"
    ),
    Mutant(f"{OPERATOR}/work_queue.py", "2.0 ** min(count - 1, 20)", "1.0", f"{UNIT}/test_work_queue.py"),
    Mutant(f"{OPERATOR}/kube/leader.py", "if holder == self._identity or is_free", "if True", f"{UNIT}/test_leader.py"),
    Mutant(f"{OPERATOR}/decide/slots.py", "if pod.is_rejected:", "if False:", UNIT),
    Mutant("api/cormorant_client/address.py", "parts.username or ", "", "tests/unit/client/test_head.py"),
    Mutant("api/cormorant_client/address.py", "parts.password or ", "", "tests/unit/client/test_head.py"),
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
