"""Converts rows of data sets to `VideoQuestion`s, by what their fields are. Pure; loads nothing.

An answer is the place of an option (from 0), its letter or its text; without options, an answer in
words or a list of them. A row may have a text about its video (`context`), a video file (`file`),
and the spans in which the answer is seen (`evidence`: [[t0, t1], ...], in seconds).
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from envserver_environments.roles import (
    decoded,
    fields_of,
    missing,
    roles_of,
    rows_within,
    spelled,
    table_of,
    text_of,
    value_at,
)
from envserver_environments.rows import Row

from envserver import InputError

from .context import CAPTIONS, MODALITIES, stamp
from .frames.store import SUFFIXES

DataSetName = Literal["sample", "nextqa", "egoschema", "captions"]
MAX_OPTIONS = 26

ROLES = table_of(
    question="question, Question, query, q, question_text",
    video=(
        "videoID, video.path, video, video_id, q_uid, video_idx, video_name, video_filename, "
        "vid_name, vid, metadata.video_id, video_path, file"
    ),
    options=(
        "options, option, candidates, choices.choice, choices.text, choices, mc_options, "
        "answer_choices"
    ),
    answer="answer, truth, correct_answer, label, gt",
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
_LABEL = re.compile(r"\s*(?:option\s+)?\(?([a-z])\s*[).:]+\s*(\S.*)", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"\s*\(?(\d{1,2})[).:]+\s+(\S.*)", re.DOTALL)
_LETTER = re.compile(r"(?:option\s+)?\(?([a-z])\s*[).:]*", re.IGNORECASE)
_INLINE = re.compile(r"(?:^|(?<=\s))(?:\([A-Za-z]\)|[A-Z][).:]|[a-z]\))\s+")
_COLUMN = re.compile(r"(?:a|(?:option|choice|candidate)[ _]?)\d|(?:option[ _]?)?[A-H]")
_STARTS = ("", "video", "v_", "vid")
"""Prefixes of video files that rows leave out (MSRVTT, ActivityNet, MSVD)."""
_HEADING = re.compile(r"(?:options|choices|candidates)\s*:\s*\Z", re.IGNORECASE)
_EMPTY = (None, "", "N/A")
"""Values of option columns that mean that there is no such option."""


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
    row: Row, answers: Mapping[str, Any] | None = None, columns: Mapping[str, str] | None = None
) -> VideoQuestion:
    """Reads the question in `row`.

    Args:
        answers: by question or by video, for rows that have none.
        columns: the row's fields by role (`ROLES`), where its names are unknown.

    Raises:
        InputError: the question or the answer is missing, or is none.
    """
    found = roles_of(spelled(row), ROLES, columns or {})
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
    question, options, answered = _answered(row, question, found)
    return VideoQuestion(
        **answered,
        question=f"{_with_mark(question)}{_part(found)}",
        video=video,
        options=options,
        type=text_of(found.get("type")),
        evidence=_spans(found.get("evidence")),
        context=context or in_row or None,
        file=file,
        captions=captions,
    )


def _with_mark(question: str) -> str:
    return f"{question}?" if question[-1].isalnum() else question


def _part(found: Mapping[str, Any]) -> str:
    """Says which part of the video the question is about (MVBench, STAR)."""
    try:
        start, end = float(found["start"]), float(found["end"])
    except (KeyError, TypeError, ValueError):
        return ""
    is_part = 0 <= start < end < math.inf
    return f" (From {stamp(start)} to {stamp(math.ceil(end))}.)" if is_part else ""


def _answered(
    row: Row, question: str, found: Mapping[str, Any]
) -> tuple[str, list[str], dict[str, Any]]:
    """The question without its options, they, and the right one or the right answers in words."""
    names = sorted(filter(_COLUMN.fullmatch, row))
    if "options" in found or len(names) < 2:
        names = []
    options, first = _options([row[name] for name in names] if names else found.get("options"))
    if names and (number := re.search(r"\d", names[0])):
        first = int(number[0])
    answer, index = found.get("answer"), found.get("index")
    if answer is None and index is None:
        raise missing(row, ["answer"])
    if not options:
        stem, options = _split(question)
        place = option_place(answer if index is None else index, options) if options else None
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
        place = option_place(index, options, means="index")
    if place is None:
        place = option_place(answer, options, means=means, first=first)
    if place is None:
        raise InputError(f"The row's answer is not one of its options ({fields_of(row)}).")
    return question, options, {"answer": place}


def option_place(
    answer: Any,
    options: list[str],
    *,
    means: Literal["index", "text"] | None = None,
    first: int = 0,
) -> int | None:
    """Returns the index of the option that a data set's answer means: an index, a letter, or a
    text, alone or both ("(B)", "B. red").

    Args:
        means: what an answer is that may be either.
        first: number of the first option.
    """
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    text = text_of(answer)
    number = re.fullmatch(r"(\d{1,2})(?:\.0)?", text)
    letter = _LETTER.fullmatch(text) or _LABEL.fullmatch(text)
    plain, known = _plain(text), [_plain(option) for option in options]
    by_letter = ord(letter[1].upper()) - ord("A") if letter else -1
    if letter and letter.re is _LABEL and known[by_letter : by_letter + 1] != [_plain(letter[2])]:
        by_letter = -1
    places = {
        "index": int(number[1]) - first if number else -1,
        "letter": by_letter,
        "text": known.index(plain) if known.count(plain) == 1 else -1,
    }
    valid = {kind: place for kind, place in places.items() if 0 <= place < len(options)}
    if not isinstance(answer, str) or (means == "index" and number):
        return valid.get("index")
    if means == "text" and means in valid:
        return valid[means]
    if len(set(valid.values())) > 1:
        raise InputError(
            f"The answer {text!r} is the text of one option and the {min(valid)} of another:"
            """ --env.columns '{"index": "FIELD"}' names the place of the right one."""
        )
    return next(iter(valid.values()), None)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")


def _options(raw: Any) -> tuple[list[str], int]:
    """Texts of the options, without labels A, B, C ... or 1, 2, 3 ... where all have theirs, and
    the number of the first."""
    raw = decoded(raw) or []
    if isinstance(raw, str):
        raw = _split(raw)[1] or raw.splitlines()
    if isinstance(raw, dict):
        raw = [raw[name] for name in sorted(raw)]
    while isinstance(raw, list) and raw and raw[-1] in _EMPTY:
        raw = raw[:-1]
    if not isinstance(raw, list) or not all(isinstance(one, str | int | float) for one in raw):
        raise InputError("This row's options are not a list of texts.")
    options = [str(one).strip() for one in raw]
    if len(options) == 1 or len(options) > MAX_OPTIONS or not all(options):
        raise InputError("This row's options are too few, too many, or empty.")
    labels = [label for label in map(_LABEL.fullmatch, options) if label]
    if "".join(label[1].upper() for label in labels) == string.ascii_uppercase[: len(options)]:
        return [label[2].strip() for label in labels], 0
    labels = [label for label in map(_NUMBER.fullmatch, options) if label]
    for first in (0, 1):
        if options and [int(label[1]) for label in labels] == [*range(first, first + len(options))]:
            return [label[2].strip() for label in labels], first
    return options, 0


def _split(text: str) -> tuple[str, list[str]]:
    """A question and the options "A. red", "(B) blue" that stand behind it, one after the other."""
    marks = list(_INLINE.finditer(text))
    for place in reversed(range(len(marks))):
        pairs = zip(marks[place:], string.ascii_uppercase, strict=False)
        run = [mark for mark, _ in takewhile(lambda pair: pair[1] in pair[0][0].upper(), pairs)]
        if len(run) < 2:
            continue
        ends = [*(mark.start() for mark in run[1:]), len(text)]
        options = [text[mark.end() : end].strip() for mark, end in zip(run, ends, strict=True)]
        options[-1], _, rest = options[-1].partition("\n")
        stem = _HEADING.sub("", text[: run[0].start()])
        return "\n".join(filter(None, (stem.strip(), rest.strip()))), options
    return text, []


def _spans(raw: Any) -> list[list[float]]:
    if isinstance(raw, str) and (ends := re.fullmatch(r"([\d.]+|nan)\s*-\s*([\d.]+|nan)", raw)):
        raw = [] if "nan" in ends.groups() else [ends.groups()]  # TVQA: "76.01-84.2"
    try:
        return [[float(start), float(end)] for start, end in raw or []]
    except (TypeError, ValueError) as error:
        raise InputError("This row's evidence is not a list of pairs of seconds.") from error
