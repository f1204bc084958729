"""The page's shell in a browser: login, a path prefix, a server that starts, pages of others; and
the description of the HTTP API, offline, where calls can be tried.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from playwright.sync_api import Page, expect
from support.api import Api
from support.browsers import Visitor, axe
from support.page_house import in_a_thread, prefix_proxy, site, small_api

from envserver import ServerConfig
from envserver.api.app import create_api
from envserver.api.bootstrap import BootstrapApp
from envserver.http.access import create_token, revoke_token
from envserver.http.health import Health, Metrics
from envserver.http.server import serve_api
from envserver.store import open_store

LINK = "#/?window=900"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return tmp_path / "tokens.yaml"


@pytest.fixture
def guarded(tmp_path: Path, tokens: Path) -> Iterator[tuple[Api, str]]:
    """A server with access tokens, and the token of a trainer."""
    token, _ = create_token(tokens, "ada", "trainer")
    with in_a_thread(lambda: small_api(tmp_path, tokens)) as api:
        yield api, token


def log_in(page: Page, token: str) -> None:
    page.get_by_label("Access token").fill(token)
    page.get_by_role("button", name="Log in").click()


def test_a_shared_link_opens_after_the_login_and_no_token_stays(
    guarded: tuple[Api, str], tokens: Path, visitor: Visitor
) -> None:
    api, token = guarded
    visitor.allow("status of 401")
    page = visitor.page(f"{api.url}/{LINK}")
    expect(page.get_by_label("Access token")).to_be_focused()
    axe(page)
    log_in(page, "evs_wrong")
    expect(page.get_by_role("alert")).to_contain_text("not valid")
    log_in(page, token)
    expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
    assert page.url == f"{api.url}/{LINK}"
    expect(page.get_by_role("banner")).to_contain_text("ada (reader)")
    expect(page.get_by_role("banner")).to_contain_text("live")  # the stream takes the cookie, too
    axe(page)
    kept = page.evaluate("() => JSON.stringify([localStorage, sessionStorage, document.cookie])")
    assert "evs_" not in kept and "envserver_" not in kept
    (cookie,) = page.context.cookies()
    assert token not in cookie["value"]
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    # Another tab of the browser is logged in, too; logging out ends it.
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Access token")).to_be_visible()
    assert page.context.cookies() == []
    log_in(page, token)
    expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
    # The token is revoked: the page asks for another, and goes on where it was.
    revoke_token(tokens, "ada")
    again, _ = create_token(tokens, "grace", "reader")
    page.reload()
    expect(page.get_by_label("Access token")).to_be_visible()
    log_in(page, again)
    expect(page.get_by_role("banner")).to_contain_text("grace (reader)")
    assert page.url == f"{api.url}/{LINK}"


def test_the_page_works_behind_a_path_prefix(guarded: tuple[Api, str], visitor: Visitor) -> None:
    api, token = guarded
    with in_a_thread(lambda: prefix_proxy(api.url, "/lab/one")) as url:
        page = visitor.page(f"{url}{LINK}")
        log_in(page, token)
        expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.reload()
        expect(page.get_by_role("banner")).to_contain_text("ada (reader)")
        expect(page.get_by_role("banner")).to_contain_text("live")
        assert page.url == f"{url}{LINK}"
        page.close()  # and its stream with it, before the proxy goes
    assert len(asked) >= 4
    assert all(address.startswith(url) for address in asked), asked


@pytest.mark.parametrize("with_tokens", [True, False])
def test_a_page_of_another_port_reads_and_changes_nothing(
    tmp_path: Path, tokens: Path, visitor: Visitor, with_tokens: bool
) -> None:
    visitor.allow("CORS|status of 40[134]|ERR_|[Ff]rame|another host|Cross-Origin")
    token, _ = create_token(tokens, "ada", "admin")
    with in_a_thread(lambda: small_api(tmp_path, tokens if with_tokens else None)) as api:
        page = visitor.page(api.url)
        if with_tokens:
            log_in(page, token)
        expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
        body = Path(__file__).with_name("attack.html").read_text().replace("TARGET", api.url)

        async def attack(request: web.Request) -> web.Response:
            return web.Response(text=body, content_type="text/html")

        with in_a_thread(lambda: site([web.get("/", attack)])) as other:
            evil = page.context.new_page()
            evil.goto(other)
            expect(evil).to_have_title("done []")
        # Nothing was made, and the reader is still logged in.
        page.reload()
        expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
        assert "evil" not in page.evaluate("() => fetch('v1/runs').then((answer) => answer.text())")


def test_a_server_that_starts_is_waited_for(tmp_path: Path, visitor: Visitor) -> None:
    visitor.allow("status of 503")
    health = Health()
    health.expect("engine")
    ready = tmp_path / "ready"

    @contextlib.asynccontextmanager
    async def starting() -> AsyncIterator[str]:
        app = BootstrapApp(health)
        settings = ServerConfig(port=0)

        async def open_later() -> None:
            while not ready.exists():
                await asyncio.sleep(0.05)
            await app.open(create_api(store, settings=settings, metrics=Metrics()))

        async with (
            open_store(tmp_path / "s.db") as store,
            await serve_api(app, "127.0.0.1", 0, settings) as server,
        ):
            opening = asyncio.create_task(open_later())
            yield server.url
            await opening

    with in_a_thread(starting) as url:
        page = visitor.page(f"{url}/{LINK}")
        expect(page.get_by_role("status")).to_contain_text("The server is starting: engine")
        axe(page)
        ready.touch()
        expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
        assert page.url == f"{url}/{LINK}"
        page.close()


# The description of the HTTP API


def try_status(page: Page) -> None:
    """Sends GET /v1/status from the page."""
    operation = page.locator(".opblock", has_text="/v1/status")
    operation.locator(".opblock-summary-control").click()
    operation.get_by_role("button", name="Try it out").click()
    operation.get_by_role("button", name="Execute").click()


def test_behind_a_prefix_it_is_read_after_the_login_and_calls_may_send_a_token(
    tmp_path: Path, tokens: Path, visitor: Visitor
) -> None:
    visitor.allow("status of 40[13]")
    token, _ = create_token(tokens, "ada", "reader")
    with (
        in_a_thread(lambda: small_api(tmp_path, tokens)) as api,
        in_a_thread(lambda: prefix_proxy(api.url, "/lab")) as url,
    ):
        page = visitor.page(f"{url}docs")
        page.get_by_role("link", name="first").click()
        log_in(page, token)
        expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
        page.get_by_role("button", name="Help").click()
        page.get_by_role("link", name="HTTP API").click()
        expect(page.get_by_role("button", name="Authorize").first).to_be_visible()
        with page.expect_response("**/v1/status") as told:
            try_status(page)
        assert told.value.status == 200
