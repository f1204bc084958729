"""Shows a run as HTML pages: no script, no other file, no network.

In: groups and their kept rollouts. Out: `index.html` with everything or, for a large run, with the
summary and a list of `pages/page-0001.html`, ... What holds: all outside text is escaped (control
characters are made visible) where it is inserted, without exception; a content policy forbids
scripts and requests; memory holds one page.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup

from ..formats.token_texts import token_texts
from .formats import Options, Row, Written
from .html_view import TokenText, number, view_of
from .run_facts import RunFacts
from .seen_text import seen
from .shards import failed, needs_folder
from .stored import StoredGroup, StoredRollout

MOST_ROLLOUTS: Final = 200
"""Maximum rollouts of one page."""
MOST_CHARACTERS: Final = 4 * 2**20
"""Maximum characters of one page; the group that reaches it is the last."""
_INDEX: Final = "index.html"


class Html:
    """The format "html", with its own writer."""

    name, suffix = "html", ".html"

    def __init__(self, options: Options) -> None:
        self._options = options

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        """Returns a row for each rollout; the first one carries its group."""
        for position, rollout in enumerate(kept):
            yield {"rollout": rollout, "new": (group, kept) if position == 0 else None}

    def writer(self) -> HtmlPages:
        """Returns the writer of pages."""
        return HtmlPages(self._options.title, self._options.tokenizer)


@dataclass
class GroupLine:
    """A group in the table of a page. `rollouts`: (place on the page, rollout) each."""

    group: StoredGroup
    env: str
    task_id: str
    mean: float | None
    rollouts: list[tuple[int, StoredRollout]] = field(default_factory=list)


@dataclass(frozen=True)
class PageLine:
    """A page in the list of pages."""

    path: str
    groups: int
    rollouts: int
    mean: float | None
    first: str
    last: str


class HtmlPages:
    """Writes the pages.

    Args:
        title: title of the run; unset: the names of its environments.
        tokenizer: see `token_texts`.
        most_rollouts, most_characters: limits of one page.
    """

    def __init__(
        self,
        title: str = "",
        tokenizer: str = "",
        *,
        most_rollouts: int = MOST_ROLLOUTS,
        most_characters: int = MOST_CHARACTERS,
    ) -> None:
        self._title = title
        self._tokenizer = tokenizer
        self._most_rollouts = most_rollouts
        self._most_characters = most_characters
        self._facts = RunFacts()
        self._pages: list[PageLine] = []
        self._written: list[Written] = []
        self._begin_page()

    def open(self, folder: Path, shard_rows: int | None) -> None:
        """Prepares to write pages of at most `shard_rows` rollouts (whole groups) into `folder`.

        None: one page.
        """
        self._folder = folder
        self._is_single = shard_rows is None
        self._most_rollouts = min(self._most_rollouts, shard_rows or self._most_rollouts)

    def put(self, row: Row) -> None:
        """Adds one row of `Html.rows`.

        Raises:
            StoreError: a page cannot be written.
            ConfigError: the one page is full.
        """
        assert isinstance(row, dict)
        rollout: StoredRollout = row["rollout"]
        if row["new"] is not None:
            self._begin_group(*row["new"])
        self._count += 1
        self._lines[-1].rollouts.append((self._count, rollout))
        section = _template("rollout.html").render(
            place=self._count, rollout=rollout, view=view_of(rollout, self._token_text(rollout))
        )
        self._sections.append(Markup(section))
        self._characters += len(section)

    def close(self) -> list[Written]:
        """Writes the index. Raises as `put`."""
        whole = not self._pages
        if not whole:
            self._end_page()
        body = {"lines": self._lines, "sections": self._sections, "pages": self._pages}
        self._write(_INDEX, self._count if whole else 0, **body)
        return self._written

    def _begin_page(self) -> None:
        self._lines: list[GroupLine] = []
        self._sections: list[Markup] = []
        self._characters = self._count = 0

    def _begin_group(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> None:
        is_full = self._count + len(kept) > self._most_rollouts
        if self._lines and (is_full or self._characters >= self._most_characters):
            if self._is_single:
                raise needs_folder(f"More than {self._count} rollouts do not fit on one page")
            self._end_page()
        self._facts.add(group, kept)
        rewards = [rollout.reward for rollout in kept if rollout.reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else None
        self._lines.append(GroupLine(group, kept[0].env, kept[0].task_id, mean))

    def _end_page(self) -> None:
        path = f"pages/page-{len(self._pages) + 1:04d}.html"
        rewards = [
            rollout.reward
            for line in self._lines
            for _, rollout in line.rollouts
            if rollout.reward is not None
        ]
        mean = sum(rewards) / len(rewards) if rewards else None
        first, last = self._lines[0].task_id, self._lines[-1].task_id
        self._pages.append(PageLine(path, len(self._lines), self._count, mean, first, last))
        self._write(path, self._count, lines=self._lines, sections=self._sections)
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
        try:
            place.parent.mkdir(exist_ok=True)
            place.write_text(page, encoding="utf-8")
        except OSError as error:
            raise failed(place, error) from error
        self._written.append(Written(path, rows))

    def _token_text(self, rollout: StoredRollout) -> TokenText:
        return token_texts(rollout.model, self._tokenizer)


@functools.cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=seen,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "time": _time, "shade": _shade, "reward": _reward}
    return environment.get_template(name)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "unknown"


def _reward(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")


def _shade(value: float | None) -> str:
    """Returns the CSS class of a reward."""
    if value is None:
        return "sx"
    return f"s{min(5, max(0, round(value * 5)))}" if value == value else "sx"
