"""The snippets of docs/how-to/migrating-from-tianshou.md, as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "how-to" / "migrating-from-tianshou.md").read_text()
SNIPPETS = dict(re.findall(r"^```python\n# (\w+: \w+)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL))


def run(*names: str) -> str:
    printed: list[str] = []
    space = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    for name in names:
        exec(compile(SNIPPETS[name], name, "exec"), space)  # the guide's own code
    return "\n".join(printed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("side", ["tianshou", "cormorant"])
def test_both_sides_run_as_they_stand(side: str) -> None:
    pytest.importorskip("tianshou", reason="Tianshou is not installed; `make test-peers` runs this test")
    collected, returned = run(f"{side}: cartpole", f"{side}: evaluation").splitlines()
    assert collected.startswith("800 ")
    assert float(returned) >= 8


def test_the_side_without_tianshou_runs_without_it() -> None:
    assert run("cormorant: alone").startswith("800 torch.Size([8, ")


def test_no_snippet_is_left_out() -> None:
    assert len(SNIPPETS) == len(re.findall(r"^```python$", GUIDE, re.MULTILINE)) == 5
