"""Search and pages for agents: requested through the recording, filtered, in pages.

The text is made from the raw answer each time, by the same code: the same recording gives the same
text. An agent's mistake, and a missing page, is a ToolError; a provider's failure is
ProviderFailed, which no agent observes.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import unquote, urlsplit

from envserver_records.tasks import Json

from ..calling import Tool, ToolError, described, integer, toolbox
from ..documents import DocumentError, Limits, Text, page_of, to_text
from ..documents.reading import MOST_PAGE_CHARACTERS, PAGE_CHARACTERS, found_in
from .fetching import (
    BadAddress,
    DuckDuckGo,
    FetchLimits,
    Hit,
    Raw,
    SearchProvider,
    Tavily,
    credits_of,
    extracted,
    normal_url,
)
from .recording import Mode, NotRecorded, Recorder

# Two signs: the address is of a site that hosts benchmarks, or the text repeats the question.

DENIED = (
    "huggingface.co/datasets",
    "huggingface.co/spaces",
    "huggingface.co/api",
    "hf.co/datasets",
    "hf.co/spaces",
    "hf.co/api",
    "hf-mirror.com/datasets",
    "hf-mirror.com/api",
    "datasets-server.huggingface.co",
    "*gaia-benchmark*",
    "*gaia_benchmark*",
    "github.com/aymeric-roucher/agent_reasoning_benchmark",
    "raw.githubusercontent.com/aymeric-roucher/agent_reasoning_benchmark",
)
"""`host/path`: that place and all below it, also as a part of another address (of an archive, a
translator); `*word*`: any address with that word."""

_WORDS = 8
"""Minimum number of consecutive words of the question."""
_LEAST_WORDS = 6
"""A shorter question says too little to be known again; one up to _WORDS is looked for whole."""
_SHARE = 0.3
"""Share of all such word runs that makes a text a copy of the question."""
_MOST_READ = 2_000_000
_WORD = re.compile(r"[^\W_]+")
_QUOTED = re.compile(
    '["\u201c\u201e\u00ab][^"\u201c\u201d\u201e\u00ab\u00bb]{1,300}["\u201c\u201d\u00bb]'
)
"""A quotation of the question (a title, a saying) is also found beside the answer: not a leak."""
_TRANSLATED = ".translate.goog"

Runs = frozenset[tuple[str, ...]]
"""Runs of consecutive words."""


class LeakFilter:
    """Filters what agents may see; `denied`: in the form of DENIED."""

    def __init__(self, denied: Sequence[str] = DENIED) -> None:
        self._words = [rule.strip("*").lower() for rule in denied if rule.startswith("*")]
        places = [rule.lower().strip("/") for rule in denied if not rule.startswith("*")]
        any_place = "|".join(map(_pattern, places)) or "(?!)"
        self._places = re.compile(rf"(?<![\w.-])(?:www\.)?(?:{any_place})(?![\w-])")

    def denies(self, url: str) -> bool:
        """Whether the address is of a denied site, or contains such an address."""
        for _ in range(3):  # letters may be written as numbers, and those again
            url = unquote(url)
        url = re.sub(r"[/\\]+", "/", url.lower())
        parts = urlsplit(url.replace(":/", "://", 1))
        path = posixpath.normpath(parts.path).lstrip("/")
        direct = f"{_host(parts.hostname or '')}/{path}"
        return any(word in url for word in self._words) or any(
            self._places.search(each) for each in (direct, url)
        )

    def repeated(self, text: str, question: str) -> Runs:
        """The parts of `question` that occur in `text` word for word."""
        return _found(text[:_MOST_READ], _wanted(question))

    def is_much(self, parts: Set[tuple[str, ...]], question: str) -> bool:
        """Whether `parts` are enough of `question` to be a copy of it."""
        wanted = _wanted(question)
        return bool(wanted) and len(parts) >= _SHARE * len(wanted)

    def repeats(self, text: str, question: str) -> bool:
        return self.is_much(self.repeated(text, question), question)


def _pattern(place: str) -> str:
    host, slash, path = place.partition("/")
    return rf"{re.escape(host)}(?::\d+)?{slash}{re.escape(path)}"


def _host(name: str) -> str:
    name = name.rstrip(".")
    if name.endswith(_TRANSLATED):  # its way to write another host
        name = name.removesuffix(_TRANSLATED).replace("--", "\0").replace("-", ".")
    return name.replace("\0", "-")


@lru_cache(maxsize=1024)
def _wanted(question: str) -> Runs:
    own = [_words_of(part) for part in _QUOTED.split(question)]
    runs = frozenset(run for part in own for run in _runs(part, _WORDS))
    if runs:
        return runs
    words = _words_of(question)
    size = min(_WORDS, len(words))
    return _runs(words, size) if size >= _LEAST_WORDS else frozenset()


def _runs(words: list[str], size: int) -> Runs:
    return frozenset(tuple(words[at : at + size]) for at in range(len(words) - size + 1))


def _found(text: str, wanted: Runs) -> Runs:
    if not wanted:
        return frozenset()
    size = len(next(iter(wanted)))
    first = {run[0] for run in wanted}
    words = _words_of(text)
    starts = (tuple(words[at : at + size]) for at, word in enumerate(words) if word in first)
    return frozenset(run for run in starts if run in wanted)


def _words_of(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


VERSION = 1
"""Version of the requests' meaning; versions do not share recordings."""
RESULTS = 5
MOST_RESULTS = 20
YEARS = (1900, 2100)
LEAK = "web_leak_dropped"
LEAK_SEEN = "web_leak_seen"
_MOST_QUERY = 400
_MOST_HIT = 1000
_MOST_TEXTS = 64
_MOST_JUDGED = 4096
_MOST_VIEWERS = 10_000
_READERS = 4
"""Pages that are turned into text at a time."""
_PAGE_LIMITS = Limits(seconds=20, memory_mb=512, characters=1_000_000)
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w.:-]{1,40})", re.I)
_KINDS = {"text/html": "html", "application/xhtml+xml": "html"}


@dataclass(frozen=True)
class WebSettings:
    """The agents' view of the web.

    Args:
        mode, folder, epoch: see `recording`.
        provider: "tavily" needs a key, "duckduckgo" none.
        provider_url: unset: the provider's own.
        depth: of a search; advanced: better excerpts, for twice Tavily's credits.
        reader: what reads pages: "own", or "tavily" by its extraction.
        allow_private: allow pages in private networks.
        denied: sites that reveal answers, in the form of `DENIED`.
        leaks: hide: pages that reveal the viewer's answer seem to be missing; show: they are shown
        like others, and flagged.
    """

    mode: Mode = "live"
    folder: Path | str | None = None
    epoch: str = "1"
    provider: Literal["tavily", "duckduckgo"] = "tavily"
    provider_url: str = ""
    depth: Literal["basic", "advanced"] = "basic"
    reader: Literal["own", "tavily"] = "own"
    allow_private: bool = False
    denied: tuple[str, ...] = DENIED
    leaks: Literal["hide", "show"] = "hide"
    limits: FetchLimits = field(default_factory=FetchLimits)


@dataclass(frozen=True)
class Viewer:
    """The reader of pages.

    Args:
        group: its members see one web in mode live; "": a separate one.
        question: no text may repeat it; "": no such check.
        flag: called with LEAK if something was hidden, LEAK_SEEN if a leak was shown all the same:
        texts of which no single one repeats the question, but all together do.
        rollout: its texts are checked together; "": each text separately.
    """

    group: str = ""
    question: str = ""
    flag: Callable[[str], object] = lambda name: None
    rollout: str = ""


class Web:
    """The web of `settings`; the provider's key goes nowhere but there."""

    def __init__(self, settings: WebSettings | None = None, *, key: str = "") -> None:
        self._settings = settings = settings or WebSettings()
        asks = settings.mode in ("live", "record")
        needs_key = "tavily" in (settings.provider, settings.reader)
        if asks and needs_key and not key:
            raise ValueError("Tavily needs a key: set TAVILY_API_KEY, or take provider duckduckgo")
        self._tavily = Tavily(key, **_at(settings.provider_url))
        self._provider: SearchProvider = (
            DuckDuckGo(**_at(settings.provider_url))
            if settings.provider == "duckduckgo"
            else self._tavily
        )
        self._recorder = Recorder(settings.mode, settings.folder, settings.epoch)
        self._leaks = LeakFilter(settings.denied)
        from .fetching import Fetcher  # with an HTTP client, which agents do not need

        self._fetcher = Fetcher(
            settings.limits,
            allow_private=settings.allow_private,
            denies=self._leaks.denies if settings.leaks == "hide" else lambda url: False,
        )
        self._texts: OrderedDict[str, Text] = OrderedDict()
        self._judged: OrderedDict[tuple[str, str], bool] = OrderedDict()
        self._parts: OrderedDict[str, set[tuple[str, ...]]] = OrderedDict()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="web-readers")
        self.metrics = self._recorder.metrics

    async def __aenter__(self) -> Self:
        await self._fetcher.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._recorder.aclose()
        await self._fetcher.__aexit__(*error)
        self._readers.shutdown(wait=False, cancel_futures=True)

    def shown(self, group: str) -> Json:
        """A group's view of the web: equal for equal requests and answers. Called once per group,
        at its end."""
        settings = self._settings
        count, digest = self._recorder.shown(group)
        return {
            "mode": settings.mode,
            "recording": Path(settings.folder).name if settings.folder is not None else "",
            "epoch": settings.epoch,
            "provider": settings.provider,
            "reader": settings.reader,
            "version": VERSION,
            "answers": count,
            "digest": digest,
        }

    async def search(
        self, query: str, num_results: int, viewer: Viewer, filter_year: int | None = None
    ) -> str:
        """Results, best first, as a numbered list; `filter_year`: only pages of this year. Raises
        ToolError, ProviderFailed."""
        options = {"search_depth": "advanced"} if self._settings.depth == "advanced" else {}
        if filter_year is not None:
            options |= self._provider.of_year(filter_year)
        hits = await self.hits(query, num_results, options, viewer)
        if not hits:
            return f"[no results for {query[:_MOST_QUERY]!r}]"
        return "\n\n".join(_shown(number, hit) for number, hit in enumerate(hits, start=1))

    async def hits(self, query: str, most: int, options: Json, viewer: Viewer) -> list[Hit]:
        """Results that the viewer may see."""
        raw = await self.raw_search(query, most, options, viewer)
        hits = [hit for hit in self._provider.hits(raw) if self.may_see(hit, viewer)][:most]
        self.showing("\n".join(map(_words, hits)), viewer)
        return hits

    async def raw_search(self, query: str, most: int, options: Json, viewer: Viewer) -> Raw:
        """The provider's own answer, not filtered."""
        query = " ".join(unicodedata.normalize("NFC", query).split())
        if not query:
            raise ToolError("the query is empty.")
        if len(query) > _MOST_QUERY:
            raise ToolError(f"the query is over {_MOST_QUERY} characters.")
        options = self._provider.known_options(options)
        request = {
            "tool": "search",
            "version": VERSION,
            "provider": self._provider.name,
            "query": query,
            "max_results": most,
            "options": options,
        }

        async def ask() -> Raw:
            raw = await self._provider.search(self._fetcher, query, most, options)
            self._provider.hits(raw)  # invalid answers must not be kept
            if self._provider is self._tavily:
                self.metrics.credits += credits_of(raw)
            return raw

        return await self._recorded(request, ask, viewer)

    def may_see(self, hit: Hit, viewer: Viewer) -> bool:
        """Whether a result may be shown, or reveals the answer; that is flagged."""
        leaks = self._leaks
        if leaks.denies(hit.url) or leaks.repeats(_words(hit), viewer.question):
            return self._leaked(viewer)
        return True

    def showing(self, text: str, viewer: Viewer) -> None:
        """`viewer` is shown `text`: with all that it was shown before, it may be too much."""
        parts = self._leaks.repeated(text, viewer.question)
        if not parts:
            return
        seen = set(parts)
        if viewer.rollout:
            seen = self._parts.setdefault(viewer.rollout, set())
            seen |= parts
            self._parts.move_to_end(viewer.rollout)
            if len(self._parts) > _MOST_VIEWERS:
                self._parts.popitem(last=False)
        if self._leaks.is_much(seen, viewer.question):
            self._seen(viewer)

    async def visit(self, url: str, offset: int, limit: int, viewer: Viewer) -> str:
        where, text = await self.page(url, viewer)
        page = page_of(text, where, offset, limit)
        self.showing(f"{text.title}\n{text.text[offset : offset + limit]}", viewer)
        return page

    async def find(self, url: str, text: str, viewer: Viewer) -> str:
        where, page = await self.page(url, viewer)
        found = found_in(page, where, text)
        if found.count("\n"):  # the first line names the search text
            self.showing(found.partition("\n")[2], viewer)
        return found

    async def page(self, url: str, viewer: Viewer) -> tuple[str, Text]:
        """A page's final address, and its text. Raises ToolError, ProviderFailed."""
        try:
            url = normal_url(url)
        except BadAddress as error:
            raise ToolError(f"{url[:200]!r} cannot be read: {error}.") from error
        self._check_place(url, url, viewer)
        raw = await self._recorded(
            {"tool": "page", "version": VERSION, "reader": self._settings.reader, "url": url},
            lambda: self._fetch(url),
            viewer,
        )
        self._check_place(raw.url, url, viewer)
        if raw.error:
            raise ToolError(f"{url} cannot be read: {raw.error}.")
        text = await self._text(raw)
        if await self._repeats(raw, text, viewer.question) and not self._leaked(viewer):
            raise _unavailable(url)
        return raw.url, text

    async def _fetch(self, url: str) -> Raw:
        if self._settings.reader == "own":
            return await self._fetcher.page(url)
        answer = await self._tavily.extract(self._fetcher, url)
        self.metrics.credits += credits_of(answer)
        words = extracted(answer)
        if not words:
            return Raw(url, 200, "", b"", "Tavily gives no text of it", lasting=False)
        return Raw(url, 200, "text/markdown; charset=utf-8", words.encode(errors="replace"))

    async def _recorded(self, request: Json, fetch: Callable[[], Any], viewer: Viewer) -> Raw:
        try:
            return await self._recorder.get(request, fetch, group=viewer.group)
        except NotRecorded as error:
            raise ToolError(f"{error}.") from error

    def _check_place(self, place: str, url: str, viewer: Viewer) -> None:
        if self._leaks.denies(place) and not self._leaked(viewer):
            raise _unavailable(url)

    async def _repeats(self, raw: Raw, text: Text, question: str) -> bool:
        """`LeakFilter.repeats` for a page, whose text may be long, worked out once."""
        key = (raw.digest, question)
        if key not in self._judged:
            words = f"{text.title}\n{unquote(raw.url)}\n{text.text}"
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._readers, self._leaks.repeats, words, question)
            self._judged[key] = found
            if len(self._judged) > _MOST_JUDGED:
                self._judged.popitem(last=False)
            return found
        return self._judged[key]

    def _leaked(self, viewer: Viewer) -> bool:
        """Something gives the viewer's task away; whether it is shown all the same."""
        if self._settings.leaks == "show":
            self._seen(viewer)
            return True
        self.metrics.leaks_dropped += 1
        viewer.flag(LEAK)
        return False

    def _seen(self, viewer: Viewer) -> None:
        self.metrics.leaks_seen += 1
        viewer.flag(LEAK_SEEN)

    async def _text(self, raw: Raw) -> Text:
        key = raw.digest
        if key not in self._texts:
            loop = asyncio.get_running_loop()
            try:
                text = await loop.run_in_executor(self._readers, _read, raw)
            except DocumentError as error:
                raise ToolError(str(error)) from error
            self._texts[key] = text
            if len(self._texts) > _MOST_TEXTS:
                self._texts.popitem(last=False)
            return text
        self._texts.move_to_end(key)
        return self._texts[key]


def _unavailable(url: str) -> ToolError:
    """The same error for a leak as for a missing page."""
    return ToolError(f"{url} cannot be read: it is not available.")


def _words(hit: Hit) -> str:
    return f"{hit.title}\n{unquote(hit.url)}\n{hit.text}"


def _at(url: str) -> dict[str, str]:
    return {"url": url} if url else {}


def _shown(number: int, hit: Hit) -> str:
    lines = [f"{number}. {hit.title or '(no title)'}", f"   {hit.url}"]
    if hit.published:
        lines.append(f"   published: {hit.published}")
    if hit.text:
        text = " ".join(hit.text.split())
        lines.append(f"   {text if len(text) <= _MOST_HIT else text[:_MOST_HIT] + ' ...'}")
    return "\n".join(lines)


def _read(raw: Raw) -> Text:
    kind = raw.content_type.partition(";")[0].strip().lower()
    data = _in_unicode(raw) if kind.startswith("text/") or kind in _KINDS else raw.body
    name = raw.url.partition("?")[0]
    return to_text(data, name, kind=_KINDS.get(kind, ""), base_url=raw.url, limits=_PAGE_LIMITS)


def _in_unicode(raw: Raw) -> bytes:
    """The body in UTF-8, by the encoding that the server or the page declares."""
    head = raw.body[:2048].decode("latin-1")
    found = _CHARSET.search(raw.content_type) or _CHARSET.search(head)
    if found is None:
        return raw.body
    try:
        return raw.body.decode(found[1], errors="replace").encode(errors="replace")
    except (LookupError, ValueError):
        return raw.body


def web_tools(web: Web, viewer: Viewer | None = None) -> dict[str, Tool]:
    """`web_search`, `visit_page` and `find_in_page` for one viewer."""
    looks = viewer or Viewer()

    async def search(query: str, num_results: int = RESULTS, filter_year: int | None = None) -> str:
        return await web.search(query, num_results, looks, filter_year)

    async def visit(url: str, offset: int = 0, limit: int = PAGE_CHARACTERS) -> str:
        return await web.visit(url, offset, limit, looks)

    async def find(url: str, text: str) -> str:
        return await web.find(url, text, looks)

    most = MOST_PAGE_CHARACTERS + 3000
    return toolbox(Tool(SEARCH, search, most), Tool(VISIT, visit, most), Tool(FIND, find, most))


_URL = {"type": "string", "description": "The address of the page."}
SEARCH = described(
    "web_search",
    "Searches the web; the best results with title, address and an excerpt.",
    {
        "query": {"type": "string", "description": "What to search for."},
        "num_results": integer(f"How many results; default {RESULTS}.", maximum=MOST_RESULTS),
        "filter_year": integer("Only pages of this year; default: of all years.", *YEARS),
    },
    ["query"],
)
VISIT = described(
    "visit_page",
    "The text of a web page, or of a document on the web (PDF, spreadsheet ...), in pages.",
    {
        "url": _URL,
        "offset": integer("The first character of the page; default 0.", minimum=0),
        "limit": integer(
            f"Characters of the page; default {PAGE_CHARACTERS}.", maximum=MOST_PAGE_CHARACTERS
        ),
    },
    ["url"],
)
FIND = described(
    "find_in_page",
    "Where words stand on a web page, with what is around them.",
    {"url": _URL, "text": {"type": "string", "description": "The words to look for."}},
    ["url", "text"],
)
DESCRIPTIONS = (SEARCH, VISIT, FIND)
