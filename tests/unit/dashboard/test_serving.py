"""The shell of the page: who gets it, with which headers, and when it is not there."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from envserver.dashboard import Dashboard

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
SHELL = '<!doctype html><script type="module" src="./ui/index-1.js"></script>'


@pytest.fixture
def static(tmp_path: Path) -> Path:
    """A built page."""
    folder = tmp_path / "static"
    (folder / "ui").mkdir(parents=True)
    (folder / "index.html").write_text(SHELL)
    (folder / "ui" / "index-1.js").write_text("'x';" * 1000)
    (tmp_path / "secret.js").write_text("secret")
    return folder


async def _data(scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({"path": scope["path"]})(scope, receive, send)


@pytest.fixture
async def http(static: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the built page."""
    async with client(Dashboard(_data, static)) as made:
        yield made


@asynccontextmanager
async def client(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        yield http


async def test_browsers_get_the_shell_and_programs_the_same_json(http: httpx.AsyncClient) -> None:
    for accept in ("text/html", BROWSER["accept"], "TEXT/HTML;q=0.5, */*"):
        answer = await http.get("/", headers={"accept": accept})
        assert (answer.status_code, answer.text) == (200, SHELL), accept
        assert answer.headers["cache-control"] == "no-cache"
        assert "Accept" in answer.headers["vary"]
    for accept in ("*/*", "application/json", "text/*", "text/html;q=0", "text/plain", ""):
        answer = await http.get("/", headers={"accept": accept})
        assert answer.json() == {"path": "/"}, accept
        assert answer.headers["vary"] == "Accept"
    assert (await http.post("/", headers=BROWSER)).json() == {"path": "/"}
    assert (await http.get("/v1/x", headers=BROWSER)).json() == {"path": "/v1/x"}
    head = await http.head("/", headers=BROWSER)
    assert head.headers["content-length"] == str(len(SHELL))
    assert head.content == b""


async def test_only_files_of_the_page_are_served(http: httpx.AsyncClient) -> None:
    plain = await http.get("/ui/index-1.js", headers={"accept-encoding": "identity"})
    packed = await http.get("/ui/index-1.js", headers={"accept-encoding": "gzip"})
    assert plain.content == packed.content
    assert int(packed.headers["content-length"]) < len(plain.content) / 10
    assert "content-encoding" not in plain.headers
    assert "immutable" in plain.headers["cache-control"]
    assert plain.headers["content-type"].startswith("text/javascript")
    for name in ("", "none.js", "..", "../index.html", "%2e%2e/index.html", "..%2fsecret.js",
                 "..%2f..%2fsecret.js", "%2fetc%2fpasswd", "a%00", "index-1.js/"):  # fmt: skip
        answer = await http.get(f"/ui/{name}")
        assert answer.status_code == 404 or answer.json()["path"], name  # normalised, passed on
        assert "secret" not in answer.text


async def test_nothing_but_our_own_scripts_can_run(http: httpx.AsyncClient) -> None:
    for path in ("/", "/ui/index-1.js", "/ui/none"):
        headers = (await http.get(path, headers=BROWSER)).headers
        policy = dict(
            part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cross-origin-resource-policy"] == "same-origin"


async def test_the_description_of_the_api_runs_our_own_scripts_too(static: Path) -> None:
    (static / "docs.html").write_text("docs")
    async with client(Dashboard(_data, static)) as http:
        answer = await http.get("/docs")
        assert answer.text == "docs"
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self'" in policy and "unsafe" not in policy
        assert (await http.get("/docs/")).json() == {"path": "/docs/"}


async def test_a_page_that_was_never_built_says_how_and_nothing_else_fails(static: Path) -> None:
    async with client(Dashboard(_data, static / "none")) as http:
        answer = await http.get("/", headers=BROWSER)
        assert answer.status_code == 503
        assert "make dashboard" in answer.text
        assert "content-security-policy" in answer.headers
        assert (await http.get("/")).json() == {"path": "/"}
        (static.parent / "static").rename(static.parent / "none")
    async with client(Dashboard(_data, static.parent / "none")) as http:
        assert (await http.get("/", headers=BROWSER)).text == SHELL
