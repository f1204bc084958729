"""Reads one address of the web: bounded in time, size and redirects, public addresses only.

Out: the raw answer (inflated), which recordings keep. An error of the page (gone, too large, not a
document) is lasting; one that may pass in a minute is not.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import re
import socket
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from html.parser import HTMLParser
from typing import Any, Protocol, Self
from urllib.parse import parse_qs, parse_qsl, quote, urlencode, urljoin, urlsplit, urlunsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from envserver_records.tasks import Json
from yarl import URL

# A model names the pages, so no address may lead into the server's own network: not by number, not
# by a name, not after a redirect. Names are resolved once, checked, and the connection goes to the
# checked address.

MOST_URL_CHARACTERS = 2000
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)\Z", re.I)
_UNICAST = ipaddress.ip_network("2000::/3")
"""All assigned public addresses; other ranges contain alternative forms of private addresses."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PORTS = {"http": 80, "https": 443}
_SAFE = "%/:=&?~#+!$,;'@()*[]|"


class BadAddress(ValueError):
    """The message says why the address may not be read."""


class PrivateAddress(OSError):
    """The name resolves to an address outside of the public internet."""


def normal_url(url: str) -> str:
    """The one way in which `url` is written: no fragment, no default port, no tracking words."""
    url = url.strip()
    if len(url) > MOST_URL_CHARACTERS:
        raise BadAddress("the address is too long")
    if "://" not in url:
        url = f"https://{url}"
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").rstrip(".")
        if not host.isascii():
            host = host.encode("idna").decode()
    except (ValueError, UnicodeError) as error:
        raise BadAddress(f"it is not an address: {error}") from error
    if parts.scheme not in _PORTS:
        raise BadAddress("only http and https can be read")
    if not host or any(character.isspace() for character in host):
        raise BadAddress("it names no host")
    if parts.username is not None or parts.password is not None:
        raise BadAddress("an address with a user name is not read")
    host = f"[{host}]" if ":" in host else host
    place = host if port in (None, _PORTS[parts.scheme]) else f"{host}:{port}"
    query = parts.query
    if "utm_" in query:
        pairs = parse_qsl(query, keep_blank_values=True)
        query = urlencode([pair for pair in pairs if not pair[0].startswith("utm_")])
    path = quote(_without_dots(parts.path) or "/", safe=_SAFE)
    return urlunsplit((parts.scheme, place, path, quote(query, safe=_SAFE), ""))


def _without_dots(path: str) -> str:
    """The place that `path` leads to by its steps `.` and `..`, as clients walk them themselves."""
    steps: list[str] = []
    parts = re.sub("%2e", ".", path, flags=re.I).split("/")
    for step in parts:
        if step == ".." and len(steps) > 1:
            steps.pop()
        if step not in (".", ".."):
            steps.append(step)
    if parts[-1] in (".", ".."):
        steps.append("")
    return "/".join(steps)


def check_literal(host: str) -> None:
    """Refuses a host that is a number of a private network, or a number in disguise."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        if _NUMBER.match(host.rstrip(".").rpartition(".")[2]):
            raise PrivateAddress(f"{host} is not a valid address") from None
        return
    if not is_public(address):
        raise PrivateAddress(f"{host} is not a public address")


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether it is public, even if it is embedded in another address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address not in _UNICAST:
            return False
    return address.is_global and not address.is_multicast


# Sending and parsing are separate, since recordings keep the raw answer: parsing gives the same
# result on every day. No HTTP client is imported here: processes without network access need none.


@dataclass(frozen=True)
class Raw:
    """A web server's answer.

    `url`: after all redirects. `error`: the text for the agent instead of a page; "" if there is a
    page. `lasting`: the answer will be the same tomorrow.
    """

    url: str
    status: int
    content_type: str
    body: bytes
    error: str = ""
    lasting: bool = True

    @cached_property
    def digest(self) -> str:
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
    title: str
    url: str
    text: str
    published: str = ""


class SearchProvider(Protocol):
    name: str

    def known_options(self, options: Json) -> Json:
        """The options that this provider has and that change the results."""

    def of_year(self, year: int) -> Json:
        """The options for pages of one year only."""

    async def search(self, fetcher: Fetcher, query: str, most: int, options: Json) -> Raw: ...

    def hits(self, raw: Raw) -> list[Hit]:
        """Raises ProviderFailed: it is not an answer."""


class Tavily:
    """https://tavily.com by its HTTP API: search, and text of pages. The key goes to `url` and
    nowhere else."""

    name = "tavily"

    def __init__(self, key: str, url: str = TAVILY_URL) -> None:
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._url = url.rstrip("/")

    def known_options(self, options: Json) -> Json:
        return {name: value for name, value in options.items() if name in _OF_TAVILY}

    def of_year(self, year: int) -> Json:
        return {"start_date": f"{year:04}-01-01", "end_date": f"{year:04}-12-31"}

    async def search(self, fetcher: Fetcher, query: str, most: int, options: Json) -> Raw:
        return await self._ask(fetcher, "search", {"query": query, "max_results": most, **options})

    async def extract(self, fetcher: Fetcher, url: str) -> Raw:
        """The provider's reading of one page."""
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

    async def _ask(self, fetcher: Fetcher, path: str, body: Json) -> Raw:
        body = {**body, "include_usage": True}
        raw = await fetcher.ask(f"{self._url}/{path}", headers=self._headers, json=body)
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
    """The cost that Tavily reports for an answer; 0 if it reports none."""
    usage = _object(raw).get("usage")
    spent = usage.get("credits") if isinstance(usage, dict) else None
    return float(spent) if isinstance(spent, int | float) and spent > 0 else 0.0


def extracted(raw: Raw) -> str:
    """The text in an answer of Tavily's `extract`; "" where it could not read the page."""
    results = _object(raw).get("results")
    first = results[0] if isinstance(results, list) and results else {}
    return str(first.get("raw_content") or "") if isinstance(first, dict) else ""


def _object(raw: Raw) -> Json:
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

    def known_options(self, options: Json) -> Json:
        return {"df": options["df"]} if "df" in options else {}

    def of_year(self, year: int) -> Json:
        return {"df": f"{year:04}-01-01..{year:04}-12-31"}

    async def search(self, fetcher: Fetcher, query: str, most: int, options: Json) -> Raw:
        raw = await fetcher.ask(
            self._url, headers={"user-agent": "Mozilla/5.0"}, data={"q": query, **options}
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


def answer_like_tavily(query: str, hits: Iterable[Hit]) -> Json:
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


_LOOK_UPS = 8
"""Maximum number of concurrent name look-ups."""


class PublicResolver(AbstractResolver):
    """Resolves names; one with any private address is refused.

    It uses separate threads: slow look-ups must not delay the rest of the server.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_LOOK_UPS, thread_name_prefix="web-names")

    async def resolve(
        self, host: str, port: int = 0, family: Any = socket.AF_INET
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, look_up, host, port, family)
        for result in found:
            if not is_public(ipaddress.ip_address(result["host"].partition("%")[0])):
                raise PrivateAddress(f"{host} leads to a private address")
        return found

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def look_up(host: str, port: int, family: int) -> list[ResolveResult]:
    """The addresses of a name, as numbers. Raises OSError."""
    kind = socket.SOCK_STREAM
    found = socket.getaddrinfo(host, port, family, kind, flags=socket.AI_ADDRCONFIG)
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return [
        ResolveResult(
            hostname=host, host=str(place[0]), port=port, family=kind, proto=proto, flags=flags
        )
        for kind, _, proto, _, place in found
    ]


_AGENT = "Mozilla/5.0 (compatible; envserver page reader)"
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_LASTING = frozenset((400, 401, 402, 403, 404, 405, 406, 410, 414, 415, 451))
_NO_DOCUMENTS = ("audio/", "video/", "font/")
_TRIES = 3
_PROVIDER_SECONDS = 60.0
_TRY_AGAIN = frozenset((408, 425, 429, 500, 502, 503, 504))


class Fetcher:
    """Reads pages for agents and calls search providers.

    `allow_private`: allow pages in private networks, for your own sites. `denies`: addresses that
    are refused, also as targets of redirects.
    """

    def __init__(
        self,
        limits: FetchLimits | None = None,
        *,
        allow_private: bool = False,
        denies: Callable[[str], bool] = lambda url: False,
    ) -> None:
        self._limits = limits or FetchLimits()
        self._allow_private = allow_private
        self._denies = denies

    async def __aenter__(self) -> Self:
        resolver = None if self._allow_private else PublicResolver()
        self._pages = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=resolver, limit=64, limit_per_host=8),
            headers={"user-agent": _AGENT, "accept-encoding": "gzip, deflate"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        self._providers = aiohttp.ClientSession(
            headers={"accept-encoding": "gzip, deflate"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pages.close()
        await self._providers.close()

    async def page(self, url: str) -> Raw:
        """A failure is an answer with `error`."""
        try:
            async with asyncio.timeout(self._limits.seconds):
                return await self._page(url)
        except TimeoutError:
            error = f"the page did not come within {self._limits.seconds:g} seconds"
            return Raw(url, 0, "", b"", error, lasting=False)

    async def _page(self, url: str) -> Raw:
        for _ in range(self._limits.redirects + 1):
            try:
                url = normal_url(url)
                if self._denies(url):
                    return Raw(url, 0, "", b"", "it is not available")
                host = URL(url).host or ""
                if not self._allow_private:
                    check_literal(host)
                async with self._pages.get(url, allow_redirects=False) as answer:
                    if answer.status in _REDIRECTS and answer.headers.get("location"):
                        url = urljoin(url, answer.headers["location"])
                        continue
                    return await self._taken(url, answer)
            except (BadAddress, PrivateAddress) as error:
                return Raw(url, 0, "", b"", str(error))
            except aiohttp.ClientConnectorError as error:
                if isinstance(error.os_error, PrivateAddress):
                    return Raw(url, 0, "", b"", str(error.os_error))
                return Raw(url, 0, "", b"", "the host cannot be reached", lasting=False)
            except aiohttp.InvalidURL:
                return Raw(url, 0, "", b"", "it is not an address")
            except (aiohttp.ClientError, ValueError) as error:
                message = f"the host's answer cannot be read ({type(error).__name__})"
                return Raw(url, 0, "", b"", message, lasting=False)
        return Raw(url, 0, "", b"", f"it redirects more than {self._limits.redirects} times")

    async def _taken(self, url: str, answer: aiohttp.ClientResponse) -> Raw:
        kind = answer.headers.get("content-type", "")[:200]
        if answer.status != 200:
            lasting = answer.status in _LASTING
            return Raw(url, answer.status, kind, b"", f"HTTP status {answer.status}", lasting)
        if kind.startswith(_NO_DOCUMENTS):
            return Raw(url, 200, kind, b"", f"{kind.partition(';')[0]} is not a document")
        body = await _bounded(answer, self._limits.bytes)
        if body is None:
            return Raw(url, 200, kind, b"", f"it has more than {self._limits.bytes:,} bytes")
        return Raw(url, 200, kind, body)

    async def ask(self, url: str, **request: Any) -> Raw:
        """Posts a request to a provider, again after a while where that may help."""
        wait, said = 1.0, ""
        for left in reversed(range(_TRIES)):
            try:
                raw = await self._posted(url, **request)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                said = type(error).__name__
            else:
                if raw.status not in _TRY_AGAIN:
                    return raw
                said = f"HTTP status {raw.status}"
            if left:
                await asyncio.sleep(wait)
                wait *= 3
        raise ProviderFailed(f"The provider at {url} does not answer: {said}.")

    async def _posted(self, url: str, **request: Any) -> Raw:
        timeout = aiohttp.ClientTimeout(total=_PROVIDER_SECONDS)
        async with self._providers.post(
            url, timeout=timeout, allow_redirects=False, **request
        ) as answer:
            body = await _bounded(answer, self._limits.bytes)
            if body is None:
                raise ProviderFailed(f"The answer of {url} is too long.")
            return Raw(url, answer.status, answer.headers.get("content-type", ""), body)


async def _bounded(answer: aiohttp.ClientResponse, most: int) -> bytes | None:
    """The body, inflated; None if it exceeds `most` bytes, packed or inflated."""
    encoding = answer.headers.get("content-encoding", "").strip().lower()
    inflater = None
    if encoding in ("gzip", "x-gzip", "deflate"):
        inflater = zlib.decompressobj(wbits=47 if "gzip" in encoding else 15)
    elif encoding not in ("", "identity"):
        raise ValueError(f"unknown encoding {encoding[:40]!r}")
    parts: list[bytes] = []
    size = packed = 0
    async for piece in answer.content.iter_chunked(1 << 16):
        packed += len(piece)
        if packed > most:  # also counts data after the end of the compressed stream
            return None
        try:
            part = inflater.decompress(piece, most + 1 - size) if inflater else piece
        except zlib.error as error:
            raise ValueError(str(error)) from error
        size += len(part)
        if size > most or (inflater and inflater.unconsumed_tail):
            return None
        parts.append(part)
    return b"".join(parts)
