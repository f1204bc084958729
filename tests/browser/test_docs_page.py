"""The description of the HTTP API in a browser: offline, and calls can be tried."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from support.browsers import Visitor
from support.page_servers import in_a_thread, prefix_proxy, small_api

from envserver.api import create_token


def try_status(page: Page) -> None:
    """Sends GET /v1/status from the page."""
    operation = page.locator(".opblock", has_text="/v1/status")
    operation.locator(".opblock-summary-control").click()
    operation.get_by_role("button", name="Try it out").click()
    operation.get_by_role("button", name="Execute").click()


@pytest.mark.parametrize("colors", ["light", "dark"])
def test_a_call_is_tried_behind_a_prefix_and_nothing_is_asked_of_other_hosts(
    tmp_path: Path, visitor: Visitor, colors: str
) -> None:
    with (
        in_a_thread(lambda: small_api(tmp_path)) as api,
        in_a_thread(lambda: prefix_proxy(api.url, "/lab")) as url,
    ):
        page = visitor.page(f"{url}docs", color_scheme=colors)
        expect(page.get_by_role("heading", name="envserver")).to_be_visible()
        visitor.shot(page, f"docs-{colors}", whole=False)
        with page.expect_response(f"{url}v1/status") as told:
            try_status(page)
        assert told.value.status == 200
        expect(page.get_by_text('"policy_version": -1').first).to_be_visible()


def test_it_is_read_after_the_login_and_calls_may_send_a_token(
    tmp_path: Path, visitor: Visitor
) -> None:
    visitor.allow("status of 40[13]")
    tokens = tmp_path / "tokens.yaml"
    token, _ = create_token(tokens, "ada", "reader")
    with in_a_thread(lambda: small_api(tmp_path, tokens)) as api:
        page = visitor.page(f"{api.url}/docs")
        page.get_by_role("link", name="first").click()
        page.get_by_label("Access token").fill(token)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
        page.get_by_role("button", name="Help").click()
        page.get_by_role("link", name="HTTP API").click()
        expect(page.get_by_role("button", name="Authorize").first).to_be_visible()
        with page.expect_response("**/v1/status") as told:
            try_status(page)
        assert told.value.status == 200
