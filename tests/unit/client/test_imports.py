"""The client is light: importing it brings neither torch nor a web framework."""

import subprocess
import sys

HEAVY = {"torch", "tensordict", "ray", "fastapi", "httpx2", "httpx", "cormorant_worker", "safetensors", "gymnasium"}


def test_importing_the_client_brings_nothing_heavy() -> None:
    code = "import cormorant_client, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert HEAVY & set(done.stdout.split()) == set()


def test_batches_as_arrays_need_no_torch() -> None:
    code = (
        "import sys, cormorant_client as c\n"
        "from cormorant_client.publishing import make_body\n"
        "import numpy as np\n"
        "make_body({'a': np.zeros(3)}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
