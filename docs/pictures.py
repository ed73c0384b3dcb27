"""Draws docs/images: the output of the README's commands, and the live page of
a job: `python docs/pictures.py`. The pages need Chromium.
"""

import hashlib
import io
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
COMMANDS = ("cormorant run job.yaml", "cormorant dataset verify data/cheetah")
COLUMNS = 100
PAGE = ROOT / "api" / "cormorant_api" / "live" / "page"
DIGEST = ROOT / "docs" / "images" / "live-page.digest"
"""Digest of the page's files when its pictures were drawn."""
SHOTS = (
    ("light", 1100, 1090),
    ("dark", 1100, 1090),
    ("narrow-light", 390, 770),
    ("narrow-dark", 390, 770),
)


def manifest() -> str:
    (found,) = re.findall(
        r"^```yaml\n(.*?)^```$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return str(found)


def digest_of_page() -> str:
    files = (path.read_bytes() for path in sorted(PAGE.iterdir()))
    return hashlib.sha256(b"".join(files)).hexdigest() + "\n"


def learn(port: int, token: str) -> None:
    """Take every batch, and publish at every 16th, until the head ends."""
    from cormorant import connect
    from cormorant.errors import ClientError
    from cormorant.policies import atari_cnn

    with (
        suppress(ClientError),
        connect(f"http://127.0.0.1:{port}", token=token) as client,
    ):
        for number, _ in enumerate(client.batches()):
            if number % 16 == 0:
                client.publish(atari_cnn(*client.spaces))


def draw_pages() -> None:
    """A minute of Pong with a learner, light, dark and narrow."""
    sys.path.append(str(ROOT / "tests" / "support"))
    from cormorant_testing.browser import chromium, watching
    from cormorant_testing.heads import HeadProcess, write_manifest

    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        folder = Path(name)
        manifest = write_manifest(folder, "Pong-v5", totalFrames=10**6)
        manifest.write_text(manifest.read_text().replace("drop_oldest", "wait"))
        with HeadProcess(manifest, folder / "head", "--workers", "2") as head:
            api = head.api("write")
            learner = threading.Thread(
                target=learn, args=(api.port, api.token), daemon=True
            )
            learner.start()
            time.sleep(75)  # what the plots show
            for kind, width, height in SHOTS:
                options = {"color_scheme": kind.removeprefix("narrow-")}
                options["viewport"] = {"width": width, "height": height}
                with watching(browser, api.port, api.token, **options) as page:
                    page.wait_for_text("#return", "-2")
                    page.page.wait_for_timeout(2000)
                    page.page.screenshot(
                        path=PICTURE.parent / f"live-page-{kind}.png"
                    )
    DIGEST.write_text(digest_of_page())


def draw_terminal() -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.yaml").write_text(manifest())
        for command in COMMANDS:
            program, *rest = shlex.split(command)
            done = subprocess.run(
                [Path(sys.executable).parent / program, *rest],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=True,
                timeout=300,
            )
            console.print(
                Text.assemble(("$ ", "bold green"), (command, "bold"))
            )
            console.print(Text(done.stdout))
    svg = console.export_svg(title="cormorant run job.yaml")
    PICTURE.write_text(
        re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    )  # without fonts from the network


if __name__ == "__main__":
    draw_terminal()
    draw_pages()
