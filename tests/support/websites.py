"""A web of its own for tests: pages, a provider like Tavily, one like DuckDuckGo; on 127.0.0.1."""

import asyncio
import gzip
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

from aiohttp import web

from support.serving import serving_aiohttp

QUESTION = "How many blue herons nested on the northern bank of the river Elbe in spring 1987"
KEY = "tvly-secret-key"


class Websites:
    """What was asked is counted by path; `failing` are statuses to give once each."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: Counter[str] = Counter()
        self.failing: list[int] = []
        self.keys: set[str] = set()
        self.searches: list[dict[str, Any]] = []
        """Bodies of the requests to search providers, without the query."""
        self.slowness = 0.0

    def results(self, query: str) -> list[dict[str, Any]]:
        """They differ each time, as those of the web do."""
        count = self.asked["/search"] + self.asked["/html"]
        return [
            {"title": f"About {query}", "url": f"{self.url}/page", "content": f"seen {count}"},
            {"title": "Sheet", "url": "https://huggingface.co/datasets/x/y", "content": "answers"},
            {"title": "Copy", "url": "https://copy.example/1", "content": f"{QUESTION}? Seven."},
        ]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked[request.path] += 1
        await asyncio.sleep(self.slowness)
        if self.failing:
            return web.Response(status=self.failing.pop(0))
        match request.path:
            case "/search":
                return await self._search(request)
            case "/extract":
                urls = (await request.json())["urls"]
                found = [{"url": urls[0], "raw_content": "text by extraction"}]
                return web.json_response({"results": found, "failed_results": []})
            case "/html":
                form = dict(await request.post())
                query = str(form.pop("q"))
                self.searches.append(form)
                return self._browsable(query)
            case "/page":
                return self._page()
            case "/hop" | "/out":
                raise web.HTTPFound(request.query["to"])
            case "/loop":
                raise web.HTTPFound("/loop")
            case "/bomb":
                head = {"content-encoding": "gzip", "content-type": "text/html"}
                return web.Response(body=gzip.compress(bytes(64 << 20)), headers=head)
            case "/film":
                return web.Response(body=b"x", content_type="video/mp4")
            case "/latin":
                page = "<meta charset='iso-8859-15'><p>10 €</p>".encode("iso-8859-15")
                return web.Response(body=page, headers={"content-type": "text/html"})
            case "/trailing":  # a page of some bytes, and then packed nothings
                head = {"content-encoding": "gzip", "content-type": "text/html"}
                return web.Response(body=gzip.compress(b"x") + bytes(8 << 20), headers=head)
            case "/titled":
                return web.Response(text=f"<title>{QUESTION}</title>7", content_type="text/html")
            case "/half":
                words = QUESTION.split()[int(request.query["from"]) :][:9]
                return web.Response(text=" ".join(words), content_type="text/plain")
            case "/leak":
                return web.Response(text=f"<p>{QUESTION}?</p><p>7</p>", content_type="text/html")
            case "/hang":
                await asyncio.sleep(30)
        raise web.HTTPNotFound

    async def _search(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("authorization", ""))
        body = await request.json()
        self.searches.append({name: body[name] for name in body if name != "query"})
        found = self.results(body["query"])
        answer = {"query": body["query"], "results": found, "usage": {"credits": 2}}
        return web.json_response(answer)

    def _browsable(self, query: str) -> web.Response:
        parts = "".join(
            f'<div class="result"><a class="result__a" href="//duckduckgo.com/l/?uddg='
            f'{quote(found["url"], safe="")}&amp;rut=1">{found["title"]} <b>!</b></a>'
            f'<a class="result__snippet" href="x">{found["content"]}</a></div>'
            for found in self.results(query)
        )
        return web.Response(text=f"<html>{parts}</html>", content_type="text/html")

    def _page(self) -> web.Response:
        count = self.asked["/page"]
        text = (
            f"<title>A page</title><h1>Visit {count}</h1><a href='/next'>on</a>" + "<p>w</p>" * 99
        )
        return web.Response(text=text, content_type="text/html")


@asynccontextmanager
async def websites() -> AsyncIterator[Websites]:
    sites = Websites()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", sites.answer)
    async with serving_aiohttp(app) as server:
        sites.url = server.url
        yield sites
