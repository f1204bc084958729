"""Decodes frames of one video: a program of its own, `python -I decoding.py REQUEST < video`.

Out: one line of JSON, `{"seconds", "frames": [{"time", "bytes"}]}` or `{"error"}`, and then the
frames as JPEG. Before the file is touched the process is confined: see `confine.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

CONTAINERS = (
    *("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi", "mpegts", "mpeg", "flv", "ogg", "asf"),
    *("mpegvideo", "gif", "jpeg_pipe", "png_pipe", "webp_pipe", "bmp_pipe"),
)
"""FFmpeg's formats that are read: none that is text or names other files. The last four are single
pictures."""
_NEAR_SECONDS = 4.0
"""How far ahead frames are decoded one by one rather than looked for."""
_ROUNDING = 1e-3
_MOST_SECONDS = 1e6


@dataclass(frozen=True)
class FrameLimits:
    """Which frames are shown, and what decoding them may take. See `Video.Config`."""

    count: int = 8  # maximum number of frames
    every: float | None = None
    side: int = 448  # longest side of a frame in pixels; smaller ones stay as they are
    max_pixels: int = 40_000_000  # maximum width times height in the file
    cpu_seconds: int = 20  # limit of the process
    memory_mb: int = 1024


@dataclass(frozen=True)
class Request(FrameLimits):
    """A request for frames of one video."""

    start: float = 0.0  # of the part, in seconds
    end: float | None = None  # None: the video's


class Refused(Exception):
    """The video cannot be shown; the message says why."""


def moments(seconds: float, request: Request) -> list[float]:
    """The part is cut in pieces, and the middle of each is shown."""
    end = min(seconds, request.end if request.end is not None else seconds)
    start = min(request.start, end)
    count = request.count
    if request.every is not None:
        count = max(1, min(count, math.ceil((end - start) / request.every - 1e-9)))
    step = (end - start) / count
    return [start + step * (place + 0.5) for place in range(count)]


class Video:
    """An open video: frames by time. `av` is PyAV."""

    def __init__(self, av: Any, numpy: Any, file: Any, max_pixels: int) -> None:
        self._av, self._numpy = av, numpy
        options = {"format_whitelist": ",".join(CONTAINERS), "protocol_whitelist": ""}
        self._container = av.open(file, options=options)
        if not self._container.streams.video:
            raise Refused("it has no pictures")
        self._stream = self._container.streams.video[0]
        self._max_pixels = max_pixels
        context = self._stream.codec_context
        context.thread_count = 1
        context.options = {"max_pixels": str(max_pixels)}
        self._check(context.width, context.height)
        self._first = float((self._stream.start_time or 0) * self._stream.time_base)
        self._frame_seconds = float(1 / (self._stream.average_rate or 10)) + _ROUNDING
        self._frames: Iterator[Any] = iter(())
        self._at = math.inf
        self._is_whole = True

    def _check(self, width: int, height: int) -> None:
        if width * height > self._max_pixels:
            raise Refused(f"its pictures have {width} times {height} pixels: too many")

    def seconds(self) -> float:
        """Returns its length; where the file does not say it, by a look at all of it."""
        stream, container = self._stream, self._container
        if container.format.name.endswith("_pipe"):
            return self._frame_seconds
        if stream.duration:
            found = float(stream.duration * stream.time_base)
        elif container.duration:
            found = container.duration / self._av.time_base
        else:
            ends = (
                float((packet.pts + (packet.duration or 0)) * stream.time_base)
                for packet in container.demux(stream)
                if packet.pts is not None
            )
            found = max(ends, default=0.0) - self._first
        if not 0 < found < _MOST_SECONDS:
            raise Refused("it does not say how long it is")
        return found

    def frame(self, time: float) -> tuple[float, Any] | None:
        """The first frame at `time` or later, or the last one, with its time."""
        if 0 <= time - self._at < _NEAR_SECONDS:
            return self._next(time)
        found = None
        for earlier in (0.0, 10.0, 60.0, time):
            self._seek(max(0.0, time - earlier))
            self._is_whole = earlier == time
            found = self._next(time)
            if found is not None and found[0] <= time + self._frame_seconds:
                break  # without an index, a file may be entered too late
        return found

    def _seek(self, time: float) -> None:
        offset = int((time + self._first) / self._stream.time_base)
        with contextlib.suppress(self._av.FFmpegError):
            self._container.seek(offset, stream=self._stream)
        self._frames = self._container.decode(self._stream)

    def _next(self, time: float) -> tuple[float, Any] | None:
        latest = None
        try:
            for frame in self._frames:
                if frame.time is None:
                    continue
                self._is_whole = self._is_whole or frame.key_frame
                if not self._is_whole:  # it builds on frames that were not decoded
                    continue
                self._check(frame.width, frame.height)
                self._at = frame.time - self._first
                latest = self._at, frame
                if self._at >= time - _ROUNDING:
                    return latest
        except self._av.FFmpegError as error:
            if isinstance(error, MemoryError):
                raise
        self._at = math.inf
        return latest

    def jpeg(self, frame: Any, side: int) -> bytes:
        """Returns a frame as JPEG, with `side` pixels at its longest side at most."""
        scale = min(1.0, side / max(frame.width, frame.height))
        width, height = (max(2, round(edge * scale)) for edge in (frame.width, frame.height))
        quarters = round(frame.rotation / 90) % 4  # a telephone that was held upright says so
        if quarters:
            small = frame.reformat(width=width, height=height, format="rgb24", threads=1)
            turned = self._numpy.rot90(small.to_ndarray(), quarters)
            height, width = turned.shape[:2]
            frame = self._av.VideoFrame.from_ndarray(self._numpy.ascontiguousarray(turned))
        small = frame.reformat(width=width, height=height, format="yuvj420p", threads=1)
        encoder = self._av.CodecContext.create("mjpeg", "w")
        encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuvj420p"
        encoder.time_base, encoder.thread_count = Fraction(1, 25), 1
        small.pts, small.time_base = 0, encoder.time_base
        return b"".join(bytes(packet) for packet in [*encoder.encode(small), *encoder.encode(None)])


def decoded(
    av: Any, numpy: Any, file: Any, request: Request
) -> tuple[float, list[tuple[float, bytes]]]:
    """Returns the length of a video and the frames that are asked for: (seconds, JPEG)."""
    try:
        video = Video(av, numpy, file, request.max_pixels)
        seconds = video.seconds()
        if request.start >= seconds:
            return seconds, []
        found = {}
        for time in moments(seconds, request):
            shown = video.frame(time)
            if shown is not None and shown[0] not in found:
                found[shown[0]] = video.jpeg(shown[1], request.side)
    except av.FFmpegError as error:
        if isinstance(error, MemoryError):
            raise
        raise Refused(f"it cannot be decoded: {error}") from error
    if not found:
        raise Refused("none of its frames can be decoded")
    return seconds, sorted(found.items())


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    sys.path.append(str(Path(__file__).parent))
    import av
    import numpy

    confining = importlib.import_module("confine")
    for module in pkgutil.walk_packages(av.__path__, "av."):  # some are imported when they are used
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    av.logging.set_level(None)
    with open(0, "rb", buffering=0, closefd=False) as file:
        frames: list[tuple[float, bytes]] = []
        try:
            confining.limit(request.cpu_seconds, request.memory_mb)
            confining.confine()
            seconds, frames = decoded(av, numpy, file, request)
            listed = [{"time": time, "bytes": len(data)} for time, data in frames]
            said: dict[str, Any] = {"seconds": seconds, "frames": listed}
        except OSError as error:
            said = {"error": f"it cannot be read in a confined process: {error}"[:300]}
        except Refused as refused:
            said = {"error": str(refused)[:300]}
        except MemoryError:
            said = {"error": f"it takes more than {request.memory_mb} MB"}
        out = sys.stdout.buffer
        out.write(json.dumps(said).encode() + b"\n")
        for _, data in frames:
            out.write(data)
        out.flush()


if __name__ == "__main__":
    main()
