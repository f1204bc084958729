"""Converts the rows of each data set to `VideoQuestion`. Pure; loads nothing.

    nextqa     video, qid, question, a0 ... a4, answer (0-4), type
    egoschema  video_idx, question_idx, question, option (a list), answer; or, as its authors have
               it, q_uid, question, "option 0" ... "option 4", the answers in a file of their own
    captions   video, question, options, answer (place, letter or text; without options: an answer
               in words, or a list of them), and if known id, file, type, evidence ([[t0, t1], ...])

A row of the last form may contain the text about the video (`context`). `file` is a video file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from envserver_environments.rows import Row

from envserver import InputError

DataSetName = Literal["sample", "nextqa", "egoschema", "captions"]
MAX_OPTIONS = 26

_LABEL = re.compile(r"\s*\(?([A-Za-z])\s*[).:]\s*(\S.*)", re.DOTALL)
_NEXTQA_OPTIONS = tuple(f"a{number}" for number in range(5))


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


def read_item(row: Row, answers: Mapping[str, Any] | None = None) -> VideoQuestion:
    """Reads the question in `row`.

    Args:
        row: with the fields of its data set.
        answers: by video, for rows that have none.

    Raises:
        InputError: the row has an unknown format, or no answer.
    """
    if all(name in row for name in _NEXTQA_OPTIONS):
        video, qid = _text(row.get("video")), _text(row.get("qid"))
        return _item(row, [row[name] for name in _NEXTQA_OPTIONS], video, row_id=f"{video}_{qid}")
    if "q_uid" in row or "video_idx" in row or "option" in row:
        video = _text(row.get("q_uid", row.get("video_idx")))
        options = row.get("option")
        if options is None:
            options = [row[name] for name in sorted(row) if re.fullmatch(r"option \d", name)]
        if "answer" not in row:
            row = {**row, "answer": (answers or {}).get(video)}
        return _item(row, options, video, row_id=video)
    if "question" in row:
        video = _text(row.get("video", row.get("video_id")))
        return _item(row, row.get("options") or [], video, row_id=_text(row.get("id")))
    names = ", ".join(map(str, list(row)[:12])) or "(none)"
    raise InputError(
        f"The fields {names} are those of no data set.", hint="Known: nextqa, egoschema, captions."
    )


def option_place(answer: Any, options: list[str]) -> int | None:
    """Returns the index of the option that a data set's answer means: an index, a letter, or a
    text."""
    if isinstance(answer, bool) or answer is None:
        return None
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, int):
        return answer if 0 <= answer < len(options) else None
    text = str(answer).strip()
    if options.count(text) == 1:
        return options.index(text)
    if re.fullmatch(r"\d{1,2}", text):
        return option_place(int(text), options)
    if re.fullmatch(r"[A-Za-z]", text):
        return option_place(ord(text.upper()) - ord("A"), options)
    return None


def _item(row: Row, raw_options: Any, video: str, *, row_id: str) -> VideoQuestion:
    options = _options(raw_options)
    question = _text(row.get("question"))
    answer, golds = row.get("answer"), []
    if not question:
        raise InputError("This row holds no question.")
    place = option_place(answer, options) if options else None
    if options and place is None:
        raise InputError("This row's answer is not one of its options.")
    if not options:
        several = answer if isinstance(answer, list) else [answer]
        golds = [text for text in map(_text, several) if text]
        if not golds:
            raise InputError("This row holds no answer.")
    return VideoQuestion(
        question=question if question.endswith((".", "?", "!")) else f"{question}?",
        video=video,
        options=options,
        answer=place,
        golds=golds,
        type=_text(row.get("type")),
        evidence=_spans(row.get("evidence")),
        row_id=row_id,
        context=row.get("context"),
        file=_text(row.get("file")),
    )


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
