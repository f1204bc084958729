"""What is known of a video, as text: captions, what was said, and scene graphs, with their times.

In: the JSON of one video (`video_context`, any of the shapes below). Out: a VideoContext, which
`as_json` turns into what a task's public part holds and `of_json` reads back; and its lines as a
model reads them, `h:mm:ss: text`, in their order, without what only repeats the line before.

    "free text", one caption a line; a line may begin with its time, `h:mm:ss: ` or `m:ss: `
    ["caption", ...], one for each 1/fps seconds
    [{"t0", "t1", "text"}, ...]
    {"captions": [...], "transcript": [...], "scene_graph": [{"t", "triples": [[s, r, o], ...]}]};
        a scene graph holds until the next one
    any other JSON: its lines, without times
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from envserver import InputError

Modality = Literal["captions", "transcript", "scene_graph"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)

_TIMED = re.compile(r"\s*(?:(\d{1,2}):)?(\d{1,2}):(\d{2})\s*(?::|-|\s)\s*(\S.*)")


@dataclass(frozen=True)
class Line:
    """One caption, one thing said, or the relations at one time.

    Args:
        t0, t1: seconds from the start, where it begins and ends; None: nobody knows.
    """

    text: str
    t0: float | None = None
    t1: float | None = None

    def overlaps(self, t0: float | None, t1: float | None) -> bool:
        """Whether it shows in [t0, t1] (None: open); what has no time may."""
        if self.t0 is None:
            return True
        end = self.t0 if self.t1 is None else self.t1
        # What ends when the span begins is over; a point in time is not.
        after = t0 is None or end > t0 or self.t0 == end == t0
        return after and (t1 is None or self.t0 <= t1)

    def __str__(self) -> str:
        return self.text if self.t0 is None else f"{stamp(self.t0)}: {self.text}"


@dataclass(frozen=True)
class VideoContext:
    """All that is known of a video, by modality; each in the order of time."""

    captions: tuple[Line, ...] = ()
    transcript: tuple[Line, ...] = ()
    scene_graph: tuple[Line, ...] = ()

    @property
    def modalities(self) -> list[Modality]:
        """Those of which there is anything."""
        return [name for name in MODALITIES if getattr(self, name)]

    def lines(
        self, modality: Modality, t0: float | None = None, t1: float | None = None
    ) -> list[Line]:
        """The lines in [t0, t1] seconds, without what only repeats the line before."""
        shown: list[Line] = []
        for line in getattr(self, modality):
            if line.overlaps(t0, t1) and (not shown or shown[-1].text != line.text):
                shown.append(line)
        return shown

    @property
    def characters(self) -> int:
        """How long all of it is."""
        return sum(len(line.text) for name in MODALITIES for line in getattr(self, name))

    @property
    def seconds(self) -> float:
        """Where the last line ends; 0.0 without any time."""
        times = [
            time
            for name in MODALITIES
            for line in getattr(self, name)
            for time in (line.t0, line.t1)
            if time is not None
        ]
        return max(times, default=0.0)

    def as_json(self) -> dict[str, Any]:
        return {name: [asdict(line) for line in getattr(self, name)] for name in self.modalities}

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> VideoContext:
        """The inverse of `as_json`."""
        return cls(**{name: tuple(Line(**line) for line in value[name]) for name in value})


def stamp(seconds: float) -> str:
    """Seconds as `h:mm:ss`."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def video_context(value: object, fps: float = 1.0) -> VideoContext:
    """What the JSON of one video tells, in any of the shapes above.

    Args:
        fps: captions a second, where they are a plain list and say no fps of their own.

    Raises:
        InputError: there is nothing in it, or it has one of the shapes but not its parts.
    """
    try:
        context = _context(value, fps)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"A video's context cannot be read: {error!r}") from error
    if not context.modalities:
        raise InputError("A video's context holds nothing.")
    return context


def _context(value: object, fps: float) -> VideoContext:
    if isinstance(value, str):
        return VideoContext(tuple(_text_lines(value)))
    if isinstance(value, list):
        return VideoContext(tuple(_in_time(_listed(value, fps))))
    if isinstance(value, dict) and any(name in value for name in MODALITIES):
        own_fps = float(value.get("fps") or fps)
        seen = VideoContext(
            tuple(_in_time(_listed(_several(value.get("captions")), own_fps))),
            tuple(_in_time(_listed(_several(value.get("transcript")), own_fps))),
        )
        moments = _in_time(map(_relations, value.get("scene_graph") or []))
        return replace(seen, scene_graph=tuple(_until_next(moments, seen.seconds)))
    if value is None:
        return VideoContext()
    return VideoContext(tuple(_text_lines(json.dumps(value, ensure_ascii=False, indent=1))))


def _several(value: Any) -> list[Any]:
    return value.splitlines() if isinstance(value, str) else value or []


def _text_lines(text: str) -> Iterator[Line]:
    for raw in text.splitlines():
        timed = _TIMED.fullmatch(raw)
        if timed:
            hours, minutes, seconds = (int(part or 0) for part in timed.groups()[:3])
            yield Line(timed[4].strip(), float(3600 * hours + 60 * minutes + seconds))
        elif raw.strip():
            yield Line(raw.strip())


def _listed(values: list[Any], fps: float) -> Iterator[Line]:
    for index, value in enumerate(values):
        if isinstance(value, str):
            if value.strip():
                yield Line(" ".join(value.split()), index / fps, (index + 1) / fps)
            continue
        text = " ".join(str(value["text"]).split())
        speaker = value.get("speaker")
        yield Line(f"{speaker}: {text}" if speaker else text, *_times(value))


def _relations(moment: dict[str, Any]) -> Line:
    triples = [f"({', '.join(str(part) for part in triple)})" for triple in moment["triples"]]
    start, end = _times(moment)
    return Line(" ".join(triples), start, end)


def _until_next(moments: list[Line], end: float) -> Iterator[Line]:
    """Each graph holds until the next one, the last to the end of the video."""
    for place, moment in enumerate(moments):
        after = moments[place + 1].t0 if place + 1 < len(moments) else end
        if moment.t0 is None or moment.t1 is not None:
            yield moment
        else:
            yield replace(moment, t1=max(moment.t0, after or end))


def _times(value: dict[str, Any]) -> tuple[float | None, float | None]:
    start, end = value.get("t0", value.get("t")), value.get("t1")
    return None if start is None else float(start), None if end is None else float(end)


def _in_time(lines: Iterable[Line]) -> list[Line]:
    """Sorted, what has no time first; of equal times in the order in which they came."""
    return sorted(lines, key=lambda line: -1.0 if line.t0 is None else line.t0)
