"""Finds texts that match a query: by BM25 in plain texts or passages, or by a retriever over HTTP.

`FewPassages` needs no library, `PassageIndex` is for whole corpora.

Both give the same hits with the same scores (Lucene's form, a word counts as often as the query
says it). Words are runs of two or more letters and digits in lower case, but for the commonest
English ones. A passage that shares no word with the query is not a hit; passages with equal scores
keep their order. Corpora are indexed by bm25s (the extra `retrieval`), which holds millions of
words in arrays; it is imported when first used. A passage is identified by its content (`key`): the
same text under the same title is the same passage, whatever its source.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import msgspec
import numpy as np
import orjson
from envserver_records.extras import install_command
from envserver_records.tasks import Json
from envserver_records.waiting import Backoff
from numpy.typing import NDArray

from envserver import ConfigError, InputError, ServiceError

K1 = 1.5
B = 0.75

STOP_WORDS = frozenset(
    {
        "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is",
        "it", "no", "not", "of", "on", "or", "such", "that", "the", "their", "then", "there",
        "these", "they", "this", "to", "was", "will", "with",
    }
)  # fmt: skip
_WORD = re.compile(r"\b\w\w+\b")


def words(text: str) -> list[str]:
    """The words of `text` that count, in order."""
    return [word for word in _WORD.findall(text.lower()) if word not in STOP_WORDS]


class BM25:
    """An index of texts that do not change."""

    def __init__(self, texts: Iterable[str]) -> None:
        counts = [Counter(words(text)) for text in texts]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / len(lengths) if any(lengths) else 1.0
        self._weights: dict[str, list[tuple[int, float]]] = {}
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for word, times in count.items():
                share = times / (times + K1 * (1 - B + B * length / mean))
                self._weights.setdefault(word, []).append((number, share))
        for word, entries in self._weights.items():
            rarity = math.log(1 + (len(counts) - len(entries) + 0.5) / (len(entries) + 0.5))
            self._weights[word] = [(number, rarity * share) for number, share in entries]

    def top(self, query: str, k: int) -> list[tuple[int, float]]:
        """The best `k` texts as (number, score), best first; each score is over 0."""
        scores: dict[int, float] = {}
        for word in words(query):
            for number, weight in self._weights.get(word, ()):
                scores[number] = scores.get(number, 0.0) + weight
        return sorted(scores.items(), key=lambda found: (-round(found[1], 9), found[0]))[:k]


@dataclass(frozen=True)
class Passage:
    """A titled piece of text; undivided text is one sentence."""

    title: str
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)

    @property
    def key(self) -> str:
        """Ten hexadecimal digits of the content's hash."""
        content = f"{self.title}\0{self.text}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(content, digest_size=5).hexdigest()

    def as_data(self) -> Json:
        return {"title": self.title, "sentences": list(self.sentences)}

    @classmethod
    def from_data(cls, data: object) -> Passage:
        """Reads a passage with `title`, and `sentences` or `text` (or `contents`).

        Without a title, the first of several lines is the title (Search-R1's corpora). Raises
        InputError: the data has another form.
        """
        if isinstance(data, str):
            data = {"contents": data}
        if not isinstance(data, dict):
            raise InputError("A passage must be an object or a text.")
        title, sentences = data.get("title"), data.get("sentences")
        if isinstance(sentences, list):
            parts = [sentence.strip() for sentence in sentences if isinstance(sentence, str)]
            if len(parts) != len(sentences) or not isinstance(title, str):
                raise InputError("A passage's title and its sentences must be texts.")
            return cls(title.strip(), tuple(parts))
        names = (
            *("text", "paragraph_text", "passage_text", "page_content", "contents", "content"),
            *("passage", "paragraph", "context", "body", "snippet", "page_snippet"),
        )
        text = next((data[name] for name in names if isinstance(data.get(name), str)), None)
        if text is None:
            raise InputError("A passage must have sentences, a text or contents.")
        if not isinstance(title, str):
            title, _, text = text.partition("\n") if "\n" in text else ("", "", text)
            title = title.strip().strip('"')
        return cls(title.strip(), (text.strip(),))


@dataclass(frozen=True)
class Hit:
    """A passage and its score; higher is better."""

    passage: Passage
    score: float

    def as_data(self) -> Json:
        return {**self.passage.as_data(), "score": self.score}


def passages_from(data: object) -> Iterator[Passage]:
    """Reads a list of passages; raises like `Passage.from_data`."""
    if not isinstance(data, list):
        raise InputError("There must be a list of passages.")
    for passage in data:
        yield Passage.from_data(passage)


SAME_SCORE_DECIMALS = 6
"""Number of decimals to which scores are compared."""
MANY_FOUND = 4096
"""Above this number of hits, only the best are sorted."""


class FewPassages:
    """A searchable list of a few passages, such as a question's own ten or twenty."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        self._passages = list(passages)
        self._bm25 = BM25(map(_indexed_text, self._passages))

    def search(self, query: str, top_k: int) -> list[Hit]:
        return [Hit(self._passages[i], score) for i, score in self._bm25.top(query, top_k)]


class PassageIndex:
    """A searchable corpus; immutable, so threads may share it. Raises ConfigError: bm25s is not
    installed."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        self._passages = list(passages)
        library = need_library()
        tokens = library.tokenize(
            [_indexed_text(passage) for passage in self._passages],
            stopwords=sorted(STOP_WORDS),
            show_progress=False,
        )
        self._bm25: Any = None
        if any(tokens.ids):  # it cannot index nothing
            self._bm25 = library.BM25(method="lucene", k1=K1, b=B)
            self._bm25.index(tokens, show_progress=False)

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, query: str, top_k: int) -> list[Hit]:
        wanted = words(query)
        if not wanted or self._bm25 is None:
            return []
        scores: NDArray[np.float32] = self._bm25.get_scores(wanted)
        return [Hit(self._passages[i], float(scores[i])) for i in _best(scores, top_k)]


@functools.cache
def need_library() -> Any:
    """Imports bm25s. Raises ConfigError: it is not installed."""
    try:
        library = importlib.import_module("bm25s")
    except ImportError as error:
        raise ConfigError(
            f"Searching a corpus needs the library `bm25s`, which cannot be imported: {error}.",
            hint=install_command("retrieval"),
        ) from error
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it tells of each index it builds
    return library


def _indexed_text(passage: Passage) -> str:
    return f"{passage.title}. {passage.text}"


def _best(scores: NDArray[np.float32], top_k: int) -> list[int]:
    found = np.flatnonzero(scores > 0)
    if len(found) > max(MANY_FOUND, top_k):
        least = np.partition(scores[found], -top_k)[-top_k]
        found = found[scores[found] >= least - 10**-SAME_SCORE_DECIMALS]
    rounded = np.round(scores[found].astype(np.float64), SAME_SCORE_DECIMALS)
    order = np.lexsort((found, -rounded))
    return [int(i) for i in found[order[:top_k]]]


#     POST {"queries": ["..."], "topk": 3, "return_scores": true}
#     200  {"result": [[{"document": {"id": "...", "contents": "\"Title\"\nText"}, "score": 1.5}]]}
#
# A document may also have `title` and `text`, or be a bare text; one without a score counts 0. Its
# errors are infrastructure failures, never the agent's.


class RetrieverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the retriever.

    Args:
        url: the full address, such as http://localhost:8000/retrieve.
        timeout_seconds: timeout of one try.
        retries: number of retries after temporary errors: no connection, a timeout, a status of 429
            or from 500.
        pause_seconds: pause before the first retry; doubled each time.
        most_at_once: maximum number of requests in flight; more wait.
    """

    url: str
    timeout_seconds: float = 20.0
    retries: int = 2
    pause_seconds: float = 0.5
    most_at_once: int = 32
    most_bytes: int = 8 << 20


class HttpRetriever:
    """A client of one retriever; use it with `async with`."""

    def __init__(self, settings: RetrieverSettings) -> None:
        self._settings = settings
        self._http: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(settings.most_at_once)

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_seconds)
        self._http = aiohttp.ClientSession(timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def search(self, query: str, top_k: int) -> list[Hit]:
        """At most `top_k` hits, in the retriever's order. Raises ServiceError: it does not answer,
        or its answer holds no hits."""
        body = orjson.dumps({"queries": [query], "topk": top_k, "return_scores": True})
        async with self._places:
            answer = await self._asked(body)
        try:
            return _hits(orjson.loads(answer))[:top_k]
        except (orjson.JSONDecodeError, InputError) as error:
            raise ServiceError(f"The retriever's answer cannot be read: {error}") from error

    async def _asked(self, body: bytes) -> bytes:
        backoff = Backoff(self._settings.pause_seconds)
        for failures in range(1, self._settings.retries + 1):
            try:
                return await self._post(body)
            except _MayPass:
                await asyncio.sleep(backoff.seconds(failures))
        return await self._post(body)

    async def _post(self, body: bytes) -> bytes:
        assert self._http is not None, "async with HttpRetriever(...)"
        headers = {"content-type": "application/json"}
        try:
            async with self._http.post(self._settings.url, data=body, headers=headers) as answer:
                content = await answer.content.read(self._settings.most_bytes + 1)
                while not answer.content.at_eof() and len(content) <= self._settings.most_bytes:
                    content += await answer.content.read(self._settings.most_bytes)
        except TimeoutError:
            raise _MayPass("The retriever did not answer in time.") from None
        except aiohttp.InvalidURL as error:
            raise ServiceError(f"The retriever's address is invalid: {error}") from error
        except aiohttp.ClientError as error:
            raise _MayPass(f"The retriever cannot be reached: {error}") from error
        if answer.status != 200:
            kind = _MayPass if answer.status == 429 or answer.status >= 500 else ServiceError
            raise kind(f"The retriever answers with status {answer.status}.")
        if len(content) > self._settings.most_bytes:
            raise ServiceError(f"The retriever's answer is over {self._settings.most_bytes} bytes.")
        return content


class _MayPass(ServiceError): ...


def _hits(answer: Any) -> list[Hit]:
    result = answer.get("result") if isinstance(answer, dict) else answer
    if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], list):
        raise InputError('it has no "result" with one list for the one query')
    return [_hit(found) for found in result[0]]


def _hit(found: Any) -> Hit:
    score: Any = 0.0
    if isinstance(found, dict) and "document" in found:
        found, score = found["document"], found.get("score", 0.0)
    try:
        return Hit(Passage.from_data(found), float(score))
    except (TypeError, ValueError) as error:
        raise InputError("a score is not a number") from error
