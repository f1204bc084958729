"""Converts rows to `VideoQuestion`s. An answer is the place of an option (from 0), its letter or
its text; without options, an answer in words or a list of them. A row may have a text about its
video (`context`), a video file (`file`), and the spans of seconds in which the answer is seen
(`evidence`)."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from envserver_environments.rows import (
    DataSets,
    FirstOption,
    Row,
    fields_of,
    missing,
    option_place,
    options_of,
    published,
    roles_of,
    rows_within,
    spelled,
    split_options,
    text_of,
    value_at,
)
from envserver_records.tasks import Json

from envserver import ConfigError, InputError, NotFoundError
from envserver.rows.sources import every_row

from .context import CAPTIONS, MODALITIES, VideoContext, stamp, video_context
from .frames.store import SUFFIXES, pictures_in

DataSetName = Literal["sample", "nextqa", "egoschema", "captions"]

ROLES, HUBS = published(__file__)
"""index: the place of the right option, from 0; start, end: the part of the video that the question
is about; captions: a file of them."""
_COLUMN = re.compile(
    r"(?:a|(?:answer[ _]?)?(?:option|choice|candidate)[ _]?)\d|(?:option[ _]?)?[A-H]"
)
_TAGGED = re.compile(r"\s*<answer>(.*)</answer>\s*", re.DOTALL)
_STARTS = ("", "video", "v_", "vid")
"""Prefixes of video files that rows leave out (MSRVTT, ActivityNet, MSVD)."""


@dataclass(frozen=True)
class VideoQuestion:
    """A question about a video, with its answer."""

    question: str
    video: str  # the key of the text about the video
    options: list[str] = field(default_factory=list)
    answer: int | None = None  # index of the right option; None without options
    golds: list[str] = field(default_factory=list)
    type: str = ""  # two letters as in NExT-QA; "" if unknown
    evidence: list[list[float]] = field(default_factory=list)
    context: Any = None  # the text about the video, if it is in the row
    file: str = ""  # path in the folder of videos
    captions: str = ""  # path in the folder of captions

    @property
    def names(self) -> list[str]:
        """The names under which published sets have the files of this video."""
        given = dict.fromkeys((self.video, self.file.rpartition("/")[2], self.file))
        return [f"{start}{name}" for name in given if name for start in _STARTS]


def single_rows(row: Row) -> list[Row]:
    """The rows of a row with several questions (CLEVRER, PerceptionTest); a question of which
    several options are right, or none, is asked once for each option."""
    inner = "questions" if "questions" in row else "mc_question"
    return [single for inner_row in rows_within(row, inner) for single in _judged(inner_row)]


def _judged(row: Row) -> list[Row]:
    marks, choices = value_at(row, "choices.answer"), value_at(row, "choices.choice")
    if not choices or not marks or not all(mark in ("correct", "wrong") for mark in marks):
        return [row]
    if marks.count("correct") == 1:
        return [{**row, "answer_id": marks.index("correct")}]
    return [
        {
            **row,
            "question": f"{row.get('question')} Is this right: {choice}",
            "choices": ["correct", "wrong"],
            "answer": mark,
        }
        for choice, mark in zip(choices, marks, strict=True)
    ]


def read_item(
    row: Row,
    answers: Json | None = None,
    columns: Mapping[str, str] | None = None,
    first: FirstOption = lambda: 0,
) -> VideoQuestion:
    """`answers`: by question or by video, for rows that have none."""
    found = roles_of(spelled(row), ROLES, columns or {})
    if isinstance(row.get("choice"), list):
        found.setdefault("options", row["choice"])
    question, file = text_of(found.get("question")), text_of(found.get("file"))
    if not question:
        raise missing(row, ["question"])
    video = text_of(found.get("video"))
    if video.lower().endswith(SUFFIXES):
        video, file = video.rpartition(".")[0], file or video
    if "answer" not in found:
        by = answers or {}
        found["answer"] = by.get(text_of(found.get("id")), by.get(video))
    context, captions = found.get("context"), text_of(found.get("captions"))
    if text_of(context).endswith(CAPTIONS):
        context, captions = None, text_of(context)
    in_row = {name: row[name] for name in MODALITIES if row.get(name)}
    question, options, answered = _answered(row, question, found, first)
    return VideoQuestion(
        **answered,
        question=f"{question}{'?' if question[-1].isalnum() else ''}{_part(found)}",
        video=video,
        options=options,
        type=text_of(found.get("type")),
        evidence=_spans(found.get("evidence")),
        context=context or in_row or None,
        file=file,
        captions=captions,
    )


def _part(found: Json) -> str:
    """Says which part of the video the question is about (MVBench, STAR)."""
    try:
        start, end = float(found["start"]), float(found["end"])
    except (KeyError, TypeError, ValueError):
        return ""
    is_part = 0 <= start < end < math.inf
    return f" (From {stamp(start)} to {stamp(math.ceil(end))}.)" if is_part else ""


def _answered(
    row: Row, question: str, found: Json, counted_from: FirstOption
) -> tuple[str, list[str], Json]:
    """The question without its options, they, and the right one or the right answers in words."""
    names = sorted(filter(_COLUMN.fullmatch, row))
    if "options" in found or len(names) < 2:
        names = []
    options, shown = options_of([row[name] for name in names] if names else found.get("options"))
    if names and (number := re.search(r"\d", names[0])):
        shown = int(number[0])
    answer, index = found.get("answer"), found.get("index")
    if isinstance(answer, str) and (tagged := _TAGGED.fullmatch(answer)):  # Video-R1
        answer = tagged[1]
    if answer is None and index is None:
        raise missing(row, ["answer"])
    if not options:
        stem, options = split_options(question)
        place = None
        if options:
            place = option_place(answer if index is None else index, options, first=counted_from)
        if place is not None:
            return stem, options, {"answer": place}
        several = [*(answer if isinstance(answer, list) else [answer]), found.get("aliases")]
        if not (golds := [text for text in map(text_of, several) if text]):
            raise InputError("The row has no answer.")
        return question, [], {"golds": golds}
    has_texts = "candidates" in row or "choices" in row
    means: Literal["index", "text"] | None = "index" if names else "text" if has_texts else None
    place = names.index(answer) if answer in names else None
    if index is not None:
        place = option_place(index, options, means="index", first=counted_from)
    if place is None:
        first = counted_from if shown is None else functools.partial(int, shown)
        place = option_place(answer, options, means=means, first=first)
    if place is None:
        raise InputError(
            f"The row's answer is not one of its options ({fields_of(row)}). If their numbers begin"
            " with 1, set --env.first_option 1."
        )
    return question, options, {"answer": place}


def _spans(raw: Any) -> list[list[float]]:
    if isinstance(raw, str) and (ends := re.fullmatch(r"([\d.]+|nan)\s*-\s*([\d.]+|nan)", raw)):
        raw = [] if "nan" in ends.groups() else [ends.groups()]  # TVQA: "76.01-84.2"
    try:
        return [[float(start), float(end)] for start, end in raw or []]
    except (TypeError, ValueError) as error:
        raise InputError("This row's evidence is not a list of pairs of seconds.") from error


# The texts about videos come from one file, by video, or from a folder with a file for each, found
# by the names of `VideoQuestion.names`.
DATA = Path(__file__).parent / "data"
SAMPLE = DATA / "questions.jsonl"
SAMPLE_VIDEOS = DATA / "videos"

DATA_SETS = DataSets(SAMPLE, HUBS)
MAX_CONTEXT_BYTES = 16 << 20


def answers_file(path: Path | None) -> Json:
    """Answers by video or question: an object of them as EgoSchema's `subset_answers.json`, or rows
    of `question_id` and `answer` as ActivityNet-QA's `test_a.json`."""
    answers: Json = {}
    for row in every_row(path) if path is not None else ():
        found = roles_of(row, ROLES, {})
        is_answer = "answer" in found and "id" in found
        answers |= {text_of(found["id"]): found["answer"]} if is_answer else row
    return answers


def context_file(path: Path, fps: float = 1.0) -> VideoContext:
    if not path.is_file():
        raise NotFoundError(f"There is no file {str(path)!r}.")
    if path.suffix not in CAPTIONS:
        raise InputError(f"{path.name} is not one of {', '.join(CAPTIONS)}.")
    if path.stat().st_size > MAX_CONTEXT_BYTES:
        raise InputError(f"{path.name} is larger than {MAX_CONTEXT_BYTES >> 20} MB.")
    data = path.read_bytes()
    try:
        value = json.loads(data) if path.suffix == ".json" else data.decode("utf-8-sig")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path.name} cannot be read: {error}") from error
    return video_context(value, fps)


class Folder:
    """The files of videos in a folder: by their path in it, else by a name that only one has."""

    def __init__(self, top: Path) -> None:
        self._top = top.resolve()

    def find(
        self, wanted: Iterable[str], is_right: Callable[[Path], object] = Path.is_file
    ) -> Path | None:
        """Returns the path in the folder of the first that is there; None if none is."""
        paths = list(wanted)
        for path in paths:
            with contextlib.suppress(OSError, ValueError):  # no system knows such a name
                place = (self._top / path).resolve()
                # A name comes from a data set: it stays in the folder.
                if place.is_relative_to(self._top) and is_right(place):
                    return place.relative_to(self._top)
        for path in paths:
            same = self._by_name.get(path.rpartition("/")[2], [])
            if len(same) == 1 and is_right(self._top / same[0]):
                return same[0]
        return None

    @functools.cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        files: dict[str, list[Path]] = {}
        for folder, folders, names in os.walk(self._top):
            for name in (*folders, *names):
                files.setdefault(name, []).append((Path(folder) / name).relative_to(self._top))
        return files


def video_file(videos: Folder, item: VideoQuestion) -> str:
    """Returns the path of the video, or of a folder of its frames, in the folder of videos."""
    found = videos.find([item.file, *(f"{name}{end}" for name in item.names for end in SUFFIXES)])
    found = found or videos.find(item.names, pictures_in)
    if found is None:
        raise InputError("there is no video file of its video")
    return str(found)


class Videos:
    """The texts about videos: a folder with `NAME.json`, `.txt`, `.srt` or `.vtt`, or one file: a
    JSON object by name, or rows with a video and its captions."""

    def __init__(self, place: Path, fps: float) -> None:
        self._fps = fps
        self._place = place
        self._folder = Folder(place)
        self._all: Json | None = None
        if not place.exists():
            raise NotFoundError(f"There are no captions at {str(place)!r}.")
        if place.is_file():
            value = _json_of(place) if place.suffix == ".json" else None
            self._all = value if isinstance(value, dict) else _by_video(place)

    def context(self, item: VideoQuestion) -> VideoContext | None:
        if self._all is not None:
            name = next(filter(self._all.__contains__, item.names), None)
            return None if name is None else video_context(self._all[name], self._fps)
        ends = [f"{language}{end}" for language in ("", "_en", ".en") for end in CAPTIONS]
        file = self._folder.find(
            [item.captions, *(f"{name}{end}" for name in item.names if name for end in ends)]
        )
        return None if file is None else context_file(self._place / file, self._fps)


def _by_video(place: Path) -> Json:
    roles = {"video": ROLES["video"], "context": (*ROLES["context"], *MODALITIES, "text")}
    found = [roles_of(row, roles, {}) for row in every_row(place)]
    if not all(len(videos) == len(roles) for videos in found):
        raise ConfigError(f"{place} holds no captions by video.", hint="See the room's README.")
    return {text_of(video["video"]): video["context"] for video in found}


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
