"""A real Chromium for tests of the page, driven by Playwright; axe-core judges accessibility.

axe-core (MPL-2.0, https://github.com/dequelabs/axe-core) comes from npm with the development
dependencies of envserver/dashboard; it is never shipped.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import (
    Browser,
    BrowserContext,
    Page,
    Playwright,
    Request,
    expect,
    sync_playwright,
)

from .waiting import PATIENCE

expect.set_options(timeout=1000 * PATIENCE)

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "envserver" / "dashboard"
STATIC = DASHBOARD / "static"
AXE = DASHBOARD / "node_modules" / "axe-core" / "axe.min.js"
SCREENSHOTS = ROOT / "tests" / "browser" / "screenshots"
SMALL = {"width": 380, "height": 740}
_SIZE = {"width": 1280, "height": 800}
_FLAGS = (
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")


def missing() -> str:
    """What browser tests need and this machine has not; "" if it has everything."""
    if not (STATIC / "index.html").exists():
        return "The built page"
    if not AXE.exists():
        return "axe-core"
    return "" if has_chromium() else "Chromium"


def has_chromium() -> bool:
    """Whether there is a browser; enough for pages that are not ours."""
    with sync_playwright() as playwright:
        return _chromium(playwright) is not None


def _chromium(playwright: Playwright) -> str | None:
    """The system's Chromium, else the one that `playwright install chromium` fetched."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    own = playwright.chromium.executable_path
    return found or (own if Path(own).exists() else None)


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """A browser without a window. Tests that have it must not be coroutines."""
    flags = [*_FLAGS, "--no-sandbox"] if os.geteuid() == 0 else list(_FLAGS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(playwright), args=flags)
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """Opens pages and notes what must not happen on any of them."""

    def __init__(self, browser: Browser, name: str) -> None:
        self._browser = browser
        self._name = name
        self._faults: list[str] = []
        self._allowed: list[re.Pattern[str]] = []
        self._contexts: list[BrowserContext] = []

    def context(self, **options: Any) -> BrowserContext:
        """A browser's profile of its own.

        Args:
            options: of Playwright's `new_context`: color_scheme="dark", viewport=SMALL ...
        """
        context = self._browser.new_context(**({"viewport": _SIZE} | options))
        context.set_default_timeout(1000 * PATIENCE)
        context.add_init_script(
            "addEventListener('securitypolicyviolation', (e) => console.error("
            "`CSP: ${e.violatedDirective} ${e.blockedURI} ${e.sourceFile}:${e.lineNumber}`))"
        )
        context.on("page", self._watch)
        self._contexts.append(context)
        return context

    def page(self, url: str, **options: Any) -> Page:
        """A page of a profile of its own, at `url`."""
        page = self.context(**options).new_page()
        page.goto(url)
        return page

    def allow(self, pattern: str) -> None:
        """What this test causes on purpose: "ERR_CONNECTION_REFUSED" of a killed server."""
        self._allowed.append(re.compile(pattern))

    def shot(self, page: Page, name: str = "", *, whole: bool = True) -> Path:
        """Keeps a picture of the page in tests/browser/screenshots; people look at it."""
        SCREENSHOTS.mkdir(exist_ok=True)
        path = SCREENSHOTS / f"{name or self._name}.png"
        page.screenshot(path=path, full_page=whole)
        return path

    def finish(self) -> list[str]:
        """Closes the pages. Returns console errors, CSP reports and requests to other hosts."""
        for context in self._contexts:
            context.close()
        return [
            fault
            for fault in self._faults
            if not any(pattern.search(fault) for pattern in self._allowed)
        ]

    def _watch(self, page: Page) -> None:
        hosts: set[str] = set()

        def requested(url: str, is_document: bool) -> None:
            parts = urlsplit(url)
            if parts.scheme in ("data", "blob", "about"):
                return
            if is_document and not hosts:
                hosts.add(parts.netloc)
            if parts.netloc not in hosts:
                self._faults.append(f"A request to another host: {url}")

        page.on(
            "console",
            lambda message: (
                self._faults.append(f"{message.type}: {message.text} ({message.location})")
                if message.type in ("error", "warning")
                else None
            ),
        )
        page.on("pageerror", lambda error: self._faults.append(f"uncaught: {error}"))
        page.on("request", lambda one: requested(one.url, one.is_navigation_request()))


def requests_of(page: Page | BrowserContext, part: str) -> list[Request]:
    """The requests from now on whose addresses have `part`; the list grows."""
    found: list[Request] = []
    page.on("request", lambda request: part in request.url and found.append(request))
    return found


def axe(page: Page) -> None:
    """Judges the page as it is now by WCAG 2.2 AA and axe's best practices.

    Raises:
        AssertionError: names each rule that is broken, and where.
    """
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE.read_text())
    # What the browser leaves undrawn outside the window would be judged on some runs only.
    found = page.evaluate(
        """async (rules) => {
            const late = [...document.querySelectorAll('*')]
                .filter((one) => getComputedStyle(one).contentVisibility === 'auto');
            late.forEach((one) => { one.style.contentVisibility = 'visible'; });
            try {
                const runOnly = {type: 'tag', values: rules};
                const { violations } = await axe.run(document, { runOnly });
                return violations.map((v) => [v.id, v.help, v.nodes.map((n) =>
                    `${n.target.join(' ')}: ${n.failureSummary}`)]);
            } finally { late.forEach((one) => { one.style.contentVisibility = ''; }); }
        }""",
        list(_RULES),
    )
    told = [f"{rule}: {words}\n  " + "\n  ".join(nodes[:5]) for rule, words, nodes in found]
    assert not told, "\n".join(told)


def no_sideways_scroll(page: Page) -> None:
    """Raises an AssertionError if the page is wider than its window."""
    wide = page.evaluate(
        "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert wide <= 0, f"The page is {wide} px wider than its window."


if __name__ == "__main__":  # for `make browser`: whether there is a Chromium
    with sync_playwright() as playwright:
        raise SystemExit(_chromium(playwright) is None)
