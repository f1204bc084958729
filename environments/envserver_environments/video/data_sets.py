"""Converts rows of data sets to `VideoQuestion`s, by what their fields are. Pure; loads nothing.

An answer is the place of an option (from 0), its letter or its text; without options, an answer in
words or a list of them. A row may have a text about its video (`context`), a video file (`file`),
and the spans in which the answer is seen (`evidence`: [[t0, t1], ...], in seconds).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from envserver_environments.roles import missing, roles_of
from envserver_environments.rows import Row

from envserver import InputError

DataSetName = Literal["sample", "nextqa", "egoschema", "captions"]
MAX_OPTIONS = 26

_LABEL = re.compile(r"\s*\(?([A-Za-z])\s*[).:]\s*(\S.*)", re.DOTALL)
_COLUMNS = re.compile(r"a\d|option[ _]?\d")
_INDEXES = ("answer_id", "answer_number", "correct_idx", "answer_idx", "label")
"""Names of answers that are the place of an option, from 0."""
ROLES: Mapping[str, tuple[str, ...]] = {
    "question": ("question", "Question", "query"),
    "video": ("video", "video_id", "q_uid", "video_idx", "video_name", "video_path", "vid"),
    "options": ("options", "option", "candidates", "choices.choice", "choices", "mc_options"),
    "answer": ("answer", *_INDEXES, "truth", "correct_answer"),
    "id": ("id", "question_id", "qid"),
    "type": ("type", "question_type", "task_type"),
}
"""Names of each role in published sets: NExT-QA, EgoSchema, MVBench, MLVU, STAR, PerceptionTest."""
_VIDEO_FILE = re.compile(r"(.+)\.(?:mp4|webm|mkv|mov|avi|m4v)", re.IGNORECASE)


@dataclass(frozen=True)
class VideoQuestion:
    """A question about a video, with its answer.

    Args:
        video: the key of the text about the video.
        answer: index of the right option; None without options.
        golds: right answers in words, if there are no options.
        type: of the question, two letters as in NExT-QA; "" if unknown.
        evidence: spans in seconds in which the answer is visible.
        row_id: the row's own id, "" if it has none.
        context: the text about the video, if it is in the row; as `context.video_context`.
        file: path of the video file in the folder of videos, "" if the row names none.
    """

    question: str
    video: str
    options: list[str] = field(default_factory=list)
    answer: int | None = None
    golds: list[str] = field(default_factory=list)
    type: str = ""
    evidence: list[list[float]] = field(default_factory=list)
    row_id: str = ""
    context: Any = None
    file: str = ""


def read_item(
    row: Row, answers: Mapping[str, Any] | None = None, columns: Mapping[str, str] | None = None
) -> VideoQuestion:
    """Reads the question in `row`.

    Args:
        answers: by video, for rows that have none.
        columns: the row's fields by role (`ROLES`), where its names are unknown.

    Raises:
        InputError: the question or the answer is missing, or is none.
    """
    found = roles_of(row, ROLES, columns or {})
    video = _text(found.get("video"))
    if not _text(found.get("question")):
        raise missing(row, ["question"])
    in_columns = [row[name] for name in sorted(row) if _COLUMNS.fullmatch(name)]
    options = _options(found.get("options") or in_columns)
    answer = found.get("answer", (answers or {}).get(video))
    is_index = bool(in_columns) or not any(name in row for name in ("answer", "truth"))
    file = _text(row.get("file"))
    if named := _VIDEO_FILE.fullmatch(video):
        video, file = named[1], file or video
    own = _text(found.get("id"))
    return VideoQuestion(
        **_answered(answer, options, is_index=is_index),
        question=_with_mark(_text(found["question"])),
        video=video,
        options=options,
        type=_text(found.get("type")),
        evidence=_spans(row.get("evidence")),
        row_id=f"{video}_{own}" if "qid" in row else own or ("" if "video" in row else video),
        context=row.get("context"),
        file=file,
    )


def _with_mark(question: str) -> str:
    return question if question.endswith((".", "?", "!")) else f"{question}?"


def _answered(answer: Any, options: list[str], *, is_index: bool) -> dict[str, Any]:
    """The right option, or the right answers in words."""
    if not options:
        several = answer if isinstance(answer, list) else [answer]
        if not (golds := [text for text in map(_text, several) if text]):
            raise InputError("The row has no answer.")
        return {"golds": golds}
    place = option_place(answer, options, is_index=is_index)
    if place is None:
        raise InputError("The row's answer is not one of its options.")
    return {"answer": place}


def option_place(answer: Any, options: list[str], *, is_index: bool = False) -> int | None:
    """Returns the index of the option that a data set's answer means: an index, a letter, or a
    text, alone or both ("(B)", "B. red").

    Args:
        is_index: digits are an index, also where an option's text is the same.
    """
    if isinstance(answer, bool) or answer is None:
        return None
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, int):
        return answer if 0 <= answer < len(options) else None
    text = str(answer).strip()
    if not is_index and options.count(text) == 1:
        return options.index(text)
    if re.fullmatch(r"\d{1,2}", text):
        return option_place(int(text), options)
    found = re.fullmatch(r"\(?([A-Za-z])\s*[).:]?\)?", text) or _LABEL.fullmatch(text)
    if found is None:
        return None
    place = option_place(ord(found[1].upper()) - ord("A"), options)
    named = found[2].strip() if found.re is _LABEL else None
    return place if place is not None and named in (None, options[place]) else None


def _options(raw: Any) -> list[str]:
    """Texts of the options, without labels A, B, C ... where all have theirs."""
    if not isinstance(raw, list) or not all(isinstance(one, str | int | float) for one in raw):
        raise InputError("This row's options are not a list of texts.")
    options = [str(one).strip() for one in raw]
    labels = [_LABEL.fullmatch(option) for option in options]
    if options and all(
        label and ord(label[1].upper()) - ord("A") == place for place, label in enumerate(labels)
    ):
        options = [label[2].strip() for label in labels if label]
    if len(options) == 1 or len(options) > MAX_OPTIONS or not all(options):
        raise InputError("This row's options are too few, too many, or empty.")
    return options


def _spans(raw: Any) -> list[list[float]]:
    try:
        return [[float(start), float(end)] for start, end in raw or []]
    except (TypeError, ValueError) as error:
        raise InputError("This row's evidence is not a list of pairs of seconds.") from error


def _text(value: object) -> str:
    """Returns a text or a number as text, else None."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return ""
