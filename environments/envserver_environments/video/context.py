"""The text about a video: captions, transcript and scene graphs, with their times. Models read
lines `h:mm:ss: text`, without repeats of the line before. The forms of `video_context`:

    "free text": captions, one per line; a line may begin with its time, `h:mm:ss: ` or `m:ss: `
    subtitles as .srt and .vtt files have them
    ["caption", ...]
    [{"t0", "t1", "text"}, ...], also with start, end or timestamp, and caption, sentence or line
    {"segments" or "subtitles": [...]}: a transcript
    {"sentences": [...], "timestamps": [[t0, t1], ...]}
    {"captions": [...], "transcript": [...], "scene_graph": [{"t", "triples": [[s, r, o], ...]}]}
    any other JSON: its lines, as free text

A line without a time is placed `1/fps` seconds after the one before, or, among lines with times, at
the time of the one before. A line without an end lasts until the next one.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, get_args

from envserver_records.tasks import Json

from envserver import InputError

Modality = Literal["captions", "transcript", "scene_graph"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)
CAPTIONS = (".json", ".txt", ".srt", ".vtt")

_CUE = re.compile(
    r"(?<![\d:])(\d[\d:]{0,11}[.,]\d{1,6})[ \t]{0,9}-->\s*(\d[\d:]{0,11}[.,]\d{1,6})[^\n]*\n"
    r"(.*?)(?=\n\s*\n|\Z)",
    re.DOTALL,
)
_TAG = re.compile(r"<[^<>]*>")
_TRANSCRIPTS = ("segments", "subtitles", "subtitle", "sub")
_TEXTS = ("text", "caption", "sentence", "line", "content")
_TIMED = re.compile(r"\s*(?:(\d{1,2}):)?(\d{1,2}):(\d{2})\s*(?::|-|\s)\s*(\S.*)")


@dataclass(frozen=True)
class Line:
    """One caption, one utterance, or the relations at one time, from `t0` to `t1` seconds."""

    text: str
    t0: float
    t1: float

    def overlaps(self, t0: float, t1: float) -> bool:
        """Returns whether it is visible in [t0, t1]; a line that ends at t0 is not."""
        return self.t0 <= t1 and (self.t1 > t0 or self.t0 >= t0)

    def __str__(self) -> str:
        return f"{stamp(self.t0)}: {self.text}"


@dataclass(frozen=True)
class VideoContext:
    captions: tuple[Line, ...] = ()
    transcript: tuple[Line, ...] = ()
    scene_graph: tuple[Line, ...] = ()

    @property
    def modalities(self) -> list[Modality]:
        return [name for name in MODALITIES if getattr(self, name)]

    def lines(self, modality: Modality, t0: float = 0.0, t1: float = math.inf) -> list[Line]:
        """The lines in [t0, t1] seconds, without what only repeats the line before."""
        shown: list[Line] = []
        for line in getattr(self, modality):
            if line.overlaps(t0, t1) and (not shown or shown[-1].text != line.text):
                shown.append(line)
        return shown

    @property
    def characters(self) -> int:
        return sum(len(line.text) for name in MODALITIES for line in getattr(self, name))

    @property
    def seconds(self) -> float:
        """Returns the end of the last line; 0.0 without any."""
        return max((line.t1 for name in MODALITIES for line in getattr(self, name)), default=0.0)

    def as_json(self) -> Json:
        return {name: [asdict(line) for line in getattr(self, name)] for name in self.modalities}

    @classmethod
    def of_json(cls, value: Json) -> VideoContext:
        return cls(**{name: tuple(Line(**line) for line in value[name]) for name in value})


def stamp(seconds: float) -> str:
    """Seconds as `h:mm:ss`."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def video_context(value: object, fps: float = 1.0) -> VideoContext:
    """`fps`: captions per second, if they are a plain list without an fps of their own."""
    try:
        context = _context(value, fps)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"A video's context cannot be read: {error!r}") from error
    if not context.modalities:
        raise InputError("A video's context holds nothing.")
    return context


def _context(value: object, fps: float) -> VideoContext:
    if isinstance(value, dict) and {"sentences", "timestamps"} <= value.keys():
        pairs = zip(value["sentences"], value["timestamps"], strict=True)
        value = [{"text": text, "timestamp": times} for text, times in pairs]
    elif isinstance(value, dict) and (name := next(filter(value.get, _TRANSCRIPTS), None)):
        value = {"transcript": value[name]}
    if isinstance(value, dict) and any(name in value for name in MODALITIES):
        own_fps = float(value.get("fps") or fps)
        captions = _several(value.get("captions"), own_fps)
        transcript = _several(value.get("transcript"), own_fps)
        graphs = [_relations(moment) for moment in value.get("scene_graph") or []]
        end = max((line.t1 for line in captions + transcript), default=0.0)
        return VideoContext(tuple(captions), tuple(transcript), tuple(_placed(graphs, fps, end)))
    if value is None or isinstance(value, str | list):
        return VideoContext(tuple(_several(value, fps)))
    return VideoContext(tuple(_several(json.dumps(value, ensure_ascii=False, indent=1), fps)))


@dataclass(frozen=True)
class _RawLine:
    text: str
    t0: float | None = None
    t1: float | None = None


def _several(value: str | list[Any] | None, fps: float) -> list[Line]:
    if isinstance(value, str) and (cues := _CUE.findall(value.replace("\r\n", "\n"))):
        value = [{"t0": t0, "t1": t1, "text": _TAG.sub("", text)} for t0, t1, text in cues]
    if not isinstance(value, str):
        return _placed([_raw_line(raw) for raw in value or []], fps)
    raw_lines = [_of_text(raw) for raw in value.splitlines() if raw.strip()]
    if any(line.t0 is not None for line in raw_lines):
        last = 0.0
        for place, line in enumerate(raw_lines):
            last = last if line.t0 is None else line.t0
            raw_lines[place] = replace(line, t0=last)
    return _placed(raw_lines, fps)


def _of_text(raw: str) -> _RawLine:
    timed = _TIMED.fullmatch(raw)
    if timed is None:
        return _RawLine(raw.strip())
    hours, minutes, seconds = (int(part or 0) for part in timed.groups()[:3])
    return _RawLine(timed[4].strip(), float(3600 * hours + 60 * minutes + seconds))


def _raw_line(value: Any) -> _RawLine:
    if isinstance(value, str):
        return _RawLine(" ".join(value.split()))
    text = " ".join(str(value[next((name for name in _TEXTS if name in value), "text")]).split())
    speaker = value.get("speaker")
    return _RawLine(f"{speaker}: {text}" if speaker else text, *_times(value))


def _relations(moment: Json) -> _RawLine:
    triples = [f"({', '.join(str(part) for part in triple)})" for triple in moment["triples"]]
    return _RawLine(" ".join(triples), *_times(moment))


def _times(value: Json) -> tuple[float | None, float | None]:
    moment = value.get("timestamp")
    start, end = moment if isinstance(moment, list) else (moment, None)
    for name in ("t0", "t", "start", "begin", "start_time"):
        start = value.get(name) if start is None else start
    for name in ("t1", "end", "end_time"):
        end = value.get(name) if end is None else end
    return _seconds(start), _seconds(end)


def _seconds(time: Any) -> float | None:
    """Seconds of a number, or of a text such as `00:01:12.5` and `72,5`."""
    if time is None:
        return None
    parts = str(time).replace(",", ".").split(":")
    return float(sum(float(part) * 60**place for place, part in enumerate(reversed(parts))))


def _placed(raw_lines: list[_RawLine], fps: float, end: float = 0.0) -> list[Line]:
    starts = [place / fps if line.t0 is None else line.t0 for place, line in enumerate(raw_lines)]
    if not all(math.isfinite(start) and start >= 0 for start in starts):
        raise ValueError("a time is before the start, or none at all")
    order = sorted(
        (place for place, line in enumerate(raw_lines) if line.text), key=starts.__getitem__
    )
    lines = []
    for place, after in zip_longest(order, order[1:]):
        start, stop = starts[place], raw_lines[place].t1
        if stop is None and after is not None:
            stop = starts[after]
        elif stop is None:
            stop = max(end, start if raw_lines[place].t0 is not None else start + 1 / fps)
        lines.append(Line(raw_lines[place].text, start, max(start, stop)))
    return lines
