"""Search providers: sends requests and parses the raw answers of web servers.

Sending and parsing are separate, since recordings keep the raw answer: parsing gives the same
result on every day. No HTTP client is imported here: processes without network access need none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from .fetching import Fetcher


@dataclass(frozen=True)
class Raw:
    """A web server's answer.

    Args:
        url: the address after all redirects.
        error: the text for the agent instead of a page; "" if there is a page.
        lasting: the answer will be the same tomorrow.
    """

    url: str
    status: int
    content_type: str
    body: bytes
    error: str = ""
    lasting: bool = True

    @cached_property
    def digest(self) -> str:
        """The same for equal answers."""
        facts = json.dumps([self.url, self.status, self.content_type, self.error])
        return hashlib.sha256(facts.encode() + b"\0" + self.body).hexdigest()


class ProviderFailed(Exception):
    """A search provider does not answer as it should: the server's trouble, not the agent's."""


@dataclass(frozen=True)
class FetchLimits:
    """Limits of one page. `seconds` holds for all its redirects together."""

    seconds: float = 30.0
    bytes: int = 8 << 20
    redirects: int = 5


TAVILY_URL = "https://api.tavily.com"
DUCKDUCKGO_URL = "https://html.duckduckgo.com/html/"
_OF_TAVILY = frozenset(
    (
        *("search_depth", "topic", "time_range", "start_date", "end_date", "days", "country"),
        *("include_domains", "exclude_domains", "include_answer", "include_raw_content"),
        *("include_images", "chunks_per_source", "exact_match", "format", "extract_depth"),
    )
)


@dataclass(frozen=True)
class Hit:
    """One result of a search."""

    title: str
    url: str
    text: str
    published: str = ""


class SearchProvider(Protocol):
    """Finds pages."""

    name: str

    def known_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Selects the options that this provider has and that change the results."""

    def of_year(self, year: int) -> dict[str, Any]:
        """Returns the options for pages of one year only."""

    async def search(self, fetcher: Fetcher, query: str, most: int, options: dict[str, Any]) -> Raw:
        """Returns the raw answer.

        Args:
            options: known ones.

        Raises:
            ProviderFailed: there is no answer.
        """

    def hits(self, raw: Raw) -> list[Hit]:
        """Parses the results. Raises ProviderFailed if it is not an answer."""


class Tavily:
    """https://tavily.com by its HTTP API: search, and text of pages.

    Args:
        key: stays in this object; it goes to `url` and nowhere else.
    """

    name = "tavily"

    def __init__(self, key: str, url: str = TAVILY_URL) -> None:
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._url = url.rstrip("/")

    def known_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name in _OF_TAVILY}

    def of_year(self, year: int) -> dict[str, Any]:
        return {"start_date": f"{year:04}-01-01", "end_date": f"{year:04}-12-31"}

    async def search(self, fetcher: Fetcher, query: str, most: int, options: dict[str, Any]) -> Raw:
        return await self._ask(fetcher, "search", {"query": query, "max_results": most, **options})

    async def extract(self, fetcher: Fetcher, url: str) -> Raw:
        """Returns the provider's reading of one page. Raises like `search`."""
        return await self._ask(fetcher, "extract", {"urls": [url]})

    def hits(self, raw: Raw) -> list[Hit]:
        found = _object(raw).get("results")
        return [
            Hit(
                title=str(result.get("title") or ""),
                url=str(result.get("url") or ""),
                text=str(result.get("content") or ""),
                published=str(result.get("published_date") or ""),
            )
            for result in (found if isinstance(found, list) else [])
            if isinstance(result, dict)
        ]

    async def _ask(self, fetcher: Fetcher, path: str, body: dict[str, Any]) -> Raw:
        body = {**body, "include_usage": True}
        raw = await fetcher.ask("POST", f"{self._url}/{path}", headers=self._headers, body=body)
        if raw.status != 200:
            words = _WORDS.get(raw.status, "it refuses the request")
            raise ProviderFailed(f"Tavily answered HTTP status {raw.status}: {words}.")
        return raw


_WORDS = {
    401: "the key is missing or wrong (TAVILY_API_KEY of the server)",
    403: "the key may not do this",
    432: "the plan's limit is reached",
    433: "the pay-as-you-go limit is reached",
}


def credits_of(raw: Raw) -> float:
    """Returns the cost that Tavily reports for an answer; 0 if it reports none."""
    usage = _object(raw).get("usage")
    spent = usage.get("credits") if isinstance(usage, dict) else None
    return float(spent) if isinstance(spent, int | float) and spent > 0 else 0.0


def extracted(raw: Raw) -> str:
    """The text in an answer of Tavily's `extract`; "" where it could not read the page."""
    results = _object(raw).get("results")
    first = results[0] if isinstance(results, list) and results else {}
    return str(first.get("raw_content") or "") if isinstance(first, dict) else ""


def _object(raw: Raw) -> dict[str, Any]:
    try:
        value = json.loads(raw.body)
    except (ValueError, RecursionError) as error:
        raise ProviderFailed("The provider's answer is not JSON.") from error
    if not isinstance(value, dict):
        raise ProviderFailed("The provider's answer is not a JSON object.")
    return value


class DuckDuckGo:
    """https://duckduckgo.com without a key, by its page for browsers without scripts."""

    name = "duckduckgo"

    def __init__(self, url: str = DUCKDUCKGO_URL) -> None:
        self._url = url

    def known_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"df": options["df"]} if "df" in options else {}

    def of_year(self, year: int) -> dict[str, Any]:
        return {"df": f"{year:04}-01-01..{year:04}-12-31"}

    async def search(self, fetcher: Fetcher, query: str, most: int, options: dict[str, Any]) -> Raw:
        raw = await fetcher.ask(
            "POST", self._url, headers={"user-agent": "Mozilla/5.0"}, data={"q": query, **options}
        )
        if raw.status != 200:  # 202 is its riddle for robots
            raise ProviderFailed(
                f"DuckDuckGo answered HTTP status {raw.status}: it lets us ask no more for now."
            )
        return raw

    def hits(self, raw: Raw) -> list[Hit]:
        page = _ResultPage()
        page.feed(raw.body.decode(errors="replace"))
        page.close()
        return page.hits()


class _ResultPage(HTMLParser):
    """Links of class result__a, each followed by an element of class result__snippet."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._found: list[dict[str, str]] = []
        self._part = ""
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        classes = (facts.get("class") or "").split()
        if "result__a" in classes:
            self._found.append({"title": "", "url": _target(facts.get("href") or ""), "text": ""})
            self._part, self._tag = "title", tag
        elif "result__snippet" in classes and self._found:
            self._part, self._tag = "text", tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._tag:
            self._part = self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._part:
            self._found[-1][self._part] += data

    def hits(self) -> list[Hit]:
        def plain(text: str) -> str:
            return " ".join(text.split())

        return [
            Hit(plain(found["title"]), found["url"], plain(found["text"]))
            for found in self._found
            if found["url"].startswith(("http://", "https://"))
            and "duckduckgo.com/y.js" not in found["url"]  # an advertisement
        ]


def _target(href: str) -> str:
    inner = parse_qs(urlsplit(href).query).get("uddg")
    return inner[0] if inner else href


def answer_like_tavily(query: str, hits: Iterable[Hit]) -> dict[str, Any]:
    """Hits in the shape of an answer of Tavily's, for its own client."""
    return {
        "query": query,
        "answer": None,
        "images": [],
        "follow_up_questions": None,
        "results": [
            {"title": hit.title, "url": hit.url, "content": hit.text, "score": 0.0} for hit in hits
        ],
        "response_time": 0.0,
    }
