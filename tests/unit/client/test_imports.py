"""The client is light: importing it brings neither torch nor a web framework."""

import subprocess
import sys

HEAVY = {"torch", "tensordict", "ray", "fastapi", "httpx2", "httpx", "cormorant_worker", "safetensors", "gymnasium"}


def test_publishing_arrays_brings_nothing_heavy() -> None:
    code = (
        "import sys, numpy, cormorant_client\n"
        "from cormorant_client.publishing import make_body\n"
        "make_body({'a': numpy.zeros(3)})\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert HEAVY & set(done.stdout.split()) == set()
