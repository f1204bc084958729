"""Shows a run as HTML pages: no script, no other file, no network; memory holds one page.

`index.html` has everything or, for a large run, the summary and a list of `pages/page-0001.html`,
... All outside text is escaped (control characters are made visible) where it is inserted, without
exception; a content policy forbids scripts and requests.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from envserver_records.costs import Cost
from envserver_records.records import Json, Message, text_of
from envserver_records.tasks import RewardRange
from markupsafe import Markup

from envserver.export.pages import template
from envserver.export.stored import StoredGroup, StoredRollout, StoredRow
from envserver.export.unified import called
from envserver.formats.shown_text import token_texts

from .formats import Format, Row, Written, needs_folder

MOST_NAMES = 50
OTHER = "(others)"
BINS = 10


@dataclass
class Part:
    groups: int = 0
    rollouts: int = 0
    scored: int = 0
    reward: float = 0.0

    @property
    def mean_reward(self) -> float | None:
        return self.reward / self.scored if self.scored else None


@dataclass
class RunFacts:
    """Counts of a run. Add each group once.

    Args:
        axis: the rewards that the histogram goes from and to, those that the environment declares;
            None: several ranges; it goes from the lowest to the highest reward of each.
        histogram: rollouts by reward, in equal parts of the axis; `below` and `above` it.
        ends: by finish reason, or by the limit that was reached.
        failures: failed attempts by kind; `lost`: missing rollouts by kind.
    """

    total: Part = field(default_factory=Part)
    by_env: dict[str, Part] = field(default_factory=dict)
    models: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    axis: tuple[float, float] | None = (0.0, 1.0)
    histogram: list[int] = field(default_factory=lambda: [0] * BINS)
    below: int = 0
    above: int = 0
    solved: int = 0
    truncated: int = 0
    rows: int = 0
    tokens: int = 0
    sampled: int = 0
    versions: tuple[int, int] | None = None
    first_at: float | None = None
    last_at: float | None = None

    def add(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> None:
        for failure in group.failures:
            _count(self.failures, str(failure.get("kind", "")))
        for kind, number in group.lost.items():
            _count(self.lost, kind, number)
        if not kept:
            return
        for part in (self.total, self._part(kept[0].env)):
            part.groups += 1
        self._add_time(kept[0].created_at)
        for rollout in kept:
            self._add(rollout)

    def bins(self) -> list[tuple[str, int]]:
        """Returns the parts of the histogram with their names: "0.0 to 0.1"."""
        low, high = self.axis or (0.0, 100.0)
        ends = [low + (high - low) * number / BINS for number in range(BINS + 1)]
        texts = [f"{end:.0f} %" if self.axis is None else f"{end:.4g}" for end in ends]
        if self.axis is not None and all(float(text) == round(float(text), 1) for text in texts):
            texts = [f"{end:.1f}" for end in ends]
        return [
            (f"{low} to {two}", count)
            for low, two, count in zip(texts[:-1], texts[1:], self.histogram, strict=True)
        ]

    def _add(self, rollout: StoredRollout) -> None:
        for part in (self.total, self._part(rollout.env)):
            part.rollouts += 1
            part.scored += rollout.reward is not None
            part.reward += rollout.reward or 0.0
        if rollout.reward is not None:
            self._add_reward(rollout.reward, rollout.reward_range)
        _count(self.models, rollout.model)
        _count(self.splits, rollout.split)
        _count(self.ends, rollout.limit or rollout.finish_reason or "unknown")
        for flag in rollout.flags:
            _count(self.flags, flag)
        self.truncated += rollout.truncated
        self.rows += len(rollout.rows)
        self.tokens += sum(len(row.tokens) for row in rollout.rows)
        self.sampled += rollout.sampled
        if rollout.policy_version >= 0:
            low, high = self.versions or (rollout.policy_version, rollout.policy_version)
            self.versions = (min(low, rollout.policy_version), max(high, rollout.policy_version))

    def _add_reward(self, reward: float, bounds: RewardRange) -> None:
        low, high = bounds.axis
        if self.total.scored == 1:
            self.axis = (low, high)
        elif self.axis != (low, high):
            self.axis = None
        self.solved += bounds.is_solved(reward)
        share = (reward - low) / (high - low)
        if not 0 <= share <= 1:
            self.below += share < 0
            self.above += share > 1
            return
        self.histogram[min(BINS - 1, math.floor(share * BINS))] += 1

    def _add_time(self, at: float) -> None:
        if at > 0:
            self.first_at = at if self.first_at is None else min(self.first_at, at)
            self.last_at = at if self.last_at is None else max(self.last_at, at)

    def _part(self, env: str) -> Part:
        if env not in self.by_env and len(self.by_env) >= MOST_NAMES:
            env = OTHER
        return self.by_env.setdefault(env, Part())


def _count(counter: Counter[str], name: str, number: int = 1) -> None:
    if name not in counter and len(counter) >= MOST_NAMES:
        name = OTHER
    counter[name] += number


TokenText = Callable[[int], str | None]
"""Returns the text of a token id, None where unknown."""

MOST_SHOWN = 20_000
"""Maximum characters of one text."""
MOST_MESSAGES = 400
MOST_TOKENS = 4_000
"""Maximum sampled tokens shown of one training row."""
MOST_ROWS = 8
_SHADES = (0.9, 0.5, 0.2, 0.05)


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _text(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        return str(type(value).__name__)


def _content(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(map(_part, content))
    return text_of(message) if content is None or isinstance(content, str) else _text(content)


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    return f"[{kind}, {len(_text(part)):,} characters]"


def _calls(message: Message) -> list[tuple[str, Any]]:
    """Returns the name and the arguments of each tool call of a message."""
    calls = message.get("tool_calls")
    return [_call(call) for call in calls] if isinstance(calls, list) else []


def _call(call: Any) -> tuple[str, Any]:
    is_whole = isinstance(call, dict) and isinstance(call.get("function"), dict)
    return called(call) if is_whole else ("?", call)


def _row(row: StoredRow, count: int, token_text: TokenText) -> Json:
    sampled = np.flatnonzero(row.mask)
    last = int(sampled[MOST_TOKENS]) if len(sampled) > MOST_TOKENS else len(row.tokens)
    agent = f", agent {row.agent}" if row.agent is not None else ""
    flags = f", {', '.join(row.flags)}" if row.flags else ""
    mean = f", mean logprob {float(row.logprobs[sampled].mean()):.3f}" if len(sampled) else ""
    versions = ", ".join(
        f"version {version} at {start:,} to {end:,}"
        for version, start, end in row.versions[:MOST_ROWS]
        if version >= 0
    )
    said = f"Row {count}: {len(row.tokens):,} tokens, {len(sampled):,} sampled{mean}{agent}{flags}"
    return {
        "title": f"{said}{'; ' if versions else ''}{versions}"[:MOST_SHOWN],
        "pieces": list(_pieces(row, last, token_text)),
        "left_out": max(0, len(sampled) - MOST_TOKENS),
    }


Piece = tuple[str, str, int | None]
"""Text, tooltip, and shade of a sampled token: 0 (likely) to 4; None for context."""


def _pieces(row: StoredRow, last: int, token_text: TokenText) -> Iterator[Piece]:
    start = 0
    for position in [*np.flatnonzero(row.mask[:last]).tolist(), last]:
        if position > start:
            yield _context(row.tokens[start:position].tolist(), token_text)
        if position < last:
            yield _sampled(int(row.tokens[position]), float(row.logprobs[position]), token_text)
        start = position + 1


def _context(ids: list[int], token_text: TokenText) -> Piece:
    texts = [token_text(index) for index in ids[:MOST_SHOWN]]
    known = [f" {i} " if text is None else text for i, text in zip(ids, texts, strict=False)]
    text = "".join(known)
    left_out = len(text) - MOST_SHOWN
    more = f" … {left_out:,} more characters" if left_out > 0 else ""
    return text[:MOST_SHOWN] + more, f"context, {len(ids):,} tokens", None


def _sampled(index: int, logprob: float, token_text: TokenText) -> Piece:
    probability = math.exp(min(0.0, logprob)) if math.isfinite(logprob) else 0.0
    shade = sum(probability < border for border in _SHADES)
    text = token_text(index)
    tooltip = f"id {index}, logprob {logprob:.4f}, p {probability:.3g}"
    return f"⟨{index}⟩" if text is None else text, tooltip, shade


MOST_ROLLOUTS = 200
"""Maximum rollouts of one page."""
MOST_CHARACTERS = 4 * 2**20
"""Maximum characters of one page; the group that reaches it is the last."""
_INDEX = "index.html"


class Html(Format):
    name, suffix = "html", ".html"

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        for position, rollout in enumerate(kept):
            yield {"rollout": rollout, "new": (group, kept) if position == 0 else None}

    def writer(self, folder: Path, shard_rows: int | None) -> HtmlPages:
        return HtmlPages(folder, shard_rows, self.options.title, self.options.tokenizer)


class HtmlPages:
    """Pages have whole groups."""

    def __init__(
        self,
        folder: Path,
        shard_rows: int | None,
        title: str = "",
        tokenizer: str = "",
        *,
        most_rollouts: int = MOST_ROLLOUTS,
        most_characters: int = MOST_CHARACTERS,
    ) -> None:
        self._folder = folder
        self._is_single = shard_rows is None
        self._title = title
        self._tokenizer = tokenizer
        self._most_rollouts = min(most_rollouts, shard_rows or most_rollouts)
        self._most_characters = most_characters
        self._facts = RunFacts()
        self._pages: list[Json] = []
        self._written: list[Written] = []
        self._begin_page()

    def put(self, row: Row) -> None:
        assert isinstance(row, dict)
        rollout: StoredRollout = row["rollout"]
        if row["new"] is not None:
            self._begin_group(*row["new"])
        self._count += 1
        token_text = token_texts(rollout.model, self._tokenizer)
        rows = [_row(row, n, token_text) for n, row in enumerate(rollout.rows[:MOST_ROWS], 1)]
        section = _template("rollout.html").render(
            place=self._count,
            rollout=rollout,
            rows=rows,
            cost=msgspec.convert(rollout.usage.get("cost"), Cost | None),
            hosts=Counter(request.host for request in rollout.egress).most_common(),
            most_messages=MOST_MESSAGES,
            most_rows=MOST_ROWS,
            most_shown=MOST_SHOWN,
        )
        self._sections.append(Markup(section))
        self._characters += len(section)

    def close(self) -> list[Written]:
        whole = not self._pages
        if not whole:
            self._end_page()
        body = {"groups": self._groups, "sections": self._sections, "pages": self._pages}
        self._write(_INDEX, self._count if whole else 0, **body)
        return self._written

    def _begin_page(self) -> None:
        self._groups: list[tuple[StoredGroup, Sequence[StoredRollout]]] = []
        self._sections: list[Markup] = []
        self._characters = self._count = 0

    def _begin_group(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> None:
        is_full = self._count + len(kept) > self._most_rollouts
        if self._groups and (is_full or self._characters >= self._most_characters):
            if self._is_single:
                raise needs_folder(f"More than {self._count} rollouts do not fit on one page")
            self._end_page()
        self._facts.add(group, kept)
        self._groups.append((group, kept))

    def _end_page(self) -> None:
        path = f"pages/page-{len(self._pages) + 1:04d}.html"
        rollouts = [rollout for _, kept in self._groups for rollout in kept]
        page = {
            "path": path,
            "groups": len(self._groups),
            "rollouts": self._count,
            "mean": _mean(rollouts),
            "first": rollouts[0].task_id,
            "last": rollouts[-1].task_id,
        }
        self._pages.append(page)
        self._write(path, self._count, groups=self._groups, sections=self._sections)
        self._begin_page()

    def _write(self, path: str, rows: int, **body: Any) -> None:
        is_index = path == _INDEX
        place = self._folder / path
        page = _template("run.html").render(
            title=self._title or ", ".join(self._facts.by_env) or "No rollouts",
            facts=self._facts if is_index else None,
            number_of_page=None if is_index else len(self._pages),
            **{"pages": [], **body},
        )
        place.parent.mkdir(exist_ok=True)
        place.write_text(page, encoding="utf-8")
        self._written.append(Written(path, rows))


def _mean(rollouts: Sequence[StoredRollout]) -> float | None:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _reward(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")


def _shade(value: float | None) -> str:
    if value is None:
        return "sx"
    return f"s{min(5, max(0, round(value * 5)))}" if value == value else "sx"


_template = functools.partial(
    template,
    __package__,
    number=_number,
    shade=_shade,
    reward=_reward,
    text=_text,
    mean=_mean,
    content=_content,
    calls=_calls,
)
