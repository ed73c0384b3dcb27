"""A real Chromium, and the live page in it as a person uses it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from cormorant_testing.needs import lacks

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT_MS = 120_000
"""As long as a head may take to start on a busy machine."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium of this machine; skips where there is none. Playwright downloads nothing."""
    if FOUND is None:
        lacks("chromium", "there is no Chromium on this machine (Debian: apt-get install chromium)")
    # root has no user namespaces to build a sandbox of; the page under test is our own.
    sandbox = [] if os.getuid() else ["--no-sandbox"]
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=FOUND, args=[*sandbox, "--disable-dev-shm-usage"])
        try:
            yield found
        finally:
            found.close()


class Watching:
    """The live page of one head, in a browser profile of its own."""

    def __init__(self, context: BrowserContext, port: int) -> None:
        self.origin = f"http://127.0.0.1:{port}"
        self.page: Page = context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.requests: list[str] = []
        self.errors: list[str] = []
        """What the browser complains of: scripts that fail, what its policy refuses."""
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)

    def enter(self, token: str) -> None:
        self.page.locator("#sign-in").wait_for()
        self.page.fill("#token", token)
        self.page.keyboard.press("Enter")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def wait_for_text(self, selector: str, text: str) -> None:
        self.page.wait_for_function(
            "([selector, text]) => document.querySelector(selector)?.textContent.includes(text)", arg=[selector, text]
        )

    def evaluate(self, script: str) -> Any:
        return self.page.evaluate(script)

    def asked(self, part: str) -> int:
        """How many requests there were to addresses with this part."""
        return sum(part in url for url in self.requests)


@contextmanager
def watching(
    browser: Browser, port: int, token: str = "", *, may_fail: tuple[str, ...] = ("401",), **options: Any
) -> Iterator[Watching]:
    """In the block nothing leaves the origin, no script fails and nothing is refused but answers that `may_fail`."""
    context = browser.new_context(**options)
    try:
        watched = Watching(context, port)
        watched.page.goto(f"{watched.origin}/")
        if token:
            watched.enter(token)
            watched.page.locator("#board").wait_for()
        yield watched
        urls = [urlsplit(url) for url in watched.requests if not url.startswith(f"{watched.origin}/")]
        assert [url.geturl() for url in urls if url.scheme not in ("blob", "data")] == []
        assert [error for error in watched.errors if not any(part in error for part in may_fail)] == []
    finally:
        context.close()
