"""Fixtures of browser tests; see "In a browser" in tests/README.md."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect
from support.browsers import Visitor, missing, running_chromium
from support.waiting import PATIENCE

expect.set_options(timeout=1000 * PATIENCE)


@pytest.fixture(scope="session")
def _has_browser(request: pytest.FixtureRequest) -> None:
    if not (what := missing()):
        return
    message = f"{what} is missing: run `make browser`"
    if request.config.getoption("--all-peers"):
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="module")
def browser(_has_browser: None) -> Iterator[Browser]:
    """Chromium, one for all tests of a file."""
    with running_chromium() as opened:
        yield opened


@pytest.fixture
def visitor(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Visitor]:
    """Opens pages; fails the test at its end for a console error, a CSP report, or a request to
    another host."""
    one = Visitor(browser, request.node.name)
    yield one
    faults = one.finish()
    assert not faults, "\n".join(faults)
