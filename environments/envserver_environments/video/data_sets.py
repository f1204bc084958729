"""Converts rows of data sets to `VideoQuestion`s, by what their fields are. Pure; loads nothing.

An answer is the place of an option (from 0), its letter or its text; without options, an answer in
words or a list of them. A row may have a text about its video (`context`), a video file (`file`),
and the spans in which the answer is seen (`evidence`: [[t0, t1], ...], in seconds).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from envserver_environments.options import OPTIONS, option_place, options_of, split_options
from envserver_environments.roles import (
    fields_of,
    missing,
    roles_of,
    rows_within,
    spelled,
    table_of,
    text_of,
    value_at,
)
from envserver_environments.rows import FirstOption, Row

from envserver import InputError

from .context import CAPTIONS, MODALITIES, stamp
from .frames.store import SUFFIXES

DataSetName = Literal["sample", "nextqa", "egoschema", "captions"]

ROLES = table_of(
    question="question, Question, problem, query, q, question_text",
    video=(
        "videoID, video.path, video, video_id, q_uid, video_idx, video_name, video_filename, "
        "vid_name, vid, video_uid, metadata.video_id, video_path, file"
    ),
    options=OPTIONS,
    answer="answer, truth, correct_answer, answer_value, label, gt",
    index=(
        "answer_id, answer_number, correct_idx, answer_idx, answer_index, correct_choice, "
        "correct_index"
    ),
    aliases="additional_ref_answer",
    id="question_id, qid, id",
    type="type, question_type, task_type, question_category, area",
    context="context, subtitles, subtitle, sub",
    captions="subtitle_path, captions_path",
    file="file, video_path",
    start="start",
    end="end",
    evidence="evidence, ts",
)
"""Names of each role in published sets. index: the place of the right option, from 0; start, end:
the part of the video that the question is about; captions: a file of them."""
_COLUMN = re.compile(r"(?:a|(?:option|choice|candidate)[ _]?)\d|(?:option[ _]?)?[A-H]")
_STARTS = ("", "video", "v_", "vid")
"""Prefixes of video files that rows leave out (MSRVTT, ActivityNet, MSVD)."""


@dataclass(frozen=True)
class VideoQuestion:
    """A question about a video, with its answer.

    Args:
        video: the key of the text about the video.
        answer: index of the right option; None without options.
        golds: right answers in words, if there are no options.
        type: of the question, two letters as in NExT-QA; "" if unknown.
        evidence: spans in seconds in which the answer is visible.
        context: the text about the video, if it is in the row; as `context.video_context`.
        file: path of the video file in the folder of videos, "" if the row names none.
        captions: path of the text in the folder of captions, "" if the row names none.
    """

    question: str
    video: str
    options: list[str] = field(default_factory=list)
    answer: int | None = None
    golds: list[str] = field(default_factory=list)
    type: str = ""
    evidence: list[list[float]] = field(default_factory=list)
    context: Any = None
    file: str = ""
    captions: str = ""

    @property
    def names(self) -> list[str]:
        """The names under which published sets have the files of this video."""
        given = dict.fromkeys((self.video, self.file.rpartition("/")[2], self.file))
        return [f"{start}{name}" for name in given if name for start in _STARTS]


def single_rows(row: Row) -> list[Row]:
    """The rows of a row with several questions (CLEVRER, PerceptionTest), else the row.

    A question of which several options are right, or none, is asked once for each option.
    """
    inner = "questions" if "questions" in row else "mc_question"
    return [single for one in rows_within(row, inner) for single in _judged(one)]


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
    answers: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    first: FirstOption = lambda: 0,
) -> VideoQuestion:
    """Reads the question in `row`.

    Args:
        answers: by question or by video, for rows that have none.
        columns: the row's fields by role (`ROLES`), where its names are unknown.
        first: the number of the first option, where the row does not show it.
    """
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


def _part(found: Mapping[str, Any]) -> str:
    """Says which part of the video the question is about (MVBench, STAR)."""
    try:
        start, end = float(found["start"]), float(found["end"])
    except (KeyError, TypeError, ValueError):
        return ""
    is_part = 0 <= start < end < math.inf
    return f" (From {stamp(start)} to {stamp(math.ceil(end))}.)" if is_part else ""


def _answered(
    row: Row, question: str, found: Mapping[str, Any], counted_from: FirstOption
) -> tuple[str, list[str], dict[str, Any]]:
    """The question without its options, they, and the right one or the right answers in words."""
    names = sorted(filter(_COLUMN.fullmatch, row))
    if "options" in found or len(names) < 2:
        names = []
    options, shown = options_of([row[name] for name in names] if names else found.get("options"))
    if names and (number := re.search(r"\d", names[0])):
        shown = int(number[0])
    answer, index = found.get("answer"), found.get("index")
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
