"""The service `frames`: frames of a task's video file, as images for a conversation.

Each part of a file is decoded once for all rollouts, in a confined process with limits
(`decoding.py`); frames are kept up to a number of bytes. A file that cannot be shown raises
ServiceError: its rollouts are dropped, since no model is at fault.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import json
import os
import signal
import stat
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envserver_records.extras import missing_module_hint
from envserver_records.tasks import Json

from envserver import Caller, ConfigError, InputError, ServiceError
from envserver.rows.sources import natural

from .decoding import FrameLimits, Request, moments

SUFFIXES = (".mp4", ".webm", ".mkv", ".mov", ".avi", ".m4v", ".ts", ".mpg", ".flv", ".ogv", ".wmv")
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_PROGRAM = Path(__file__).with_name("decoding.py")
_MOST_HEAD = 1 << 16
_MOST_BYTES_A_PIXEL = 3
_START_SECONDS = 10
"""Time for a process to start, besides that for the video."""

Frame = tuple[float, str]
"""Its time in seconds, and its `data:` address."""


@dataclass(frozen=True)
class Shown:
    """A part of a video: its whole length in seconds, and frames of the part."""

    seconds: float
    frames: tuple[Frame, ...]

    @property
    def size(self) -> int:
        return sum(len(url) for _, url in self.frames) + 1000

    def as_json(self) -> Json:
        frames = [{"time": time, "url": url} for time, url in self.frames]
        return {"seconds": self.seconds, "frames": frames}


class Broken(Exception):
    """A video file cannot be shown; the message says why."""


class FrameStore:
    """Frames of the video files in a folder.

    Args:
        file_mb: maximum size of a file.
        kept_mb: frames that are kept for further rollouts.
        pictures_per_second: of a video that is a folder of pictures.
        at_a_time: number of decoding processes.
    """

    def __init__(
        self,
        folder: Path,
        limits: FrameLimits,
        *,
        file_mb: int,
        kept_mb: int,
        pictures_per_second: float = 1.0,
        at_a_time: int = 2,
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._file_bytes = file_mb << 20
        self._kept_bytes = kept_mb << 20
        self._pictures_per_second = pictures_per_second
        self._places = asyncio.Semaphore(at_a_time)
        self._kept: OrderedDict[Any, Shown | Broken] = OrderedDict()
        self._size = 0
        self._locks: dict[Any, asyncio.Lock] = {}
        self._decoded_parts = 0

    def counts(self) -> dict[str, float]:
        """Returns the number of parts of videos that were decoded, for `/metrics`."""
        return {"frames_decoded": float(self._decoded_parts)}

    async def answer(self, arguments: Json, caller: Caller) -> Json:
        t0, t1 = arguments.get("t0", 0.0), arguments.get("t1")
        if not _is_time(t0) or not (t1 is None or (_is_time(t1) and t1 >= t0)):
            raise InputError("t0 and t1 are seconds from the start, t1 not before t0.")
        name = caller.task.public["file"]
        try:
            return (await self.frames(name, float(t0), t1)).as_json()
        except Broken as broken:
            raise ServiceError(
                f"The video {name!r} of task {caller.task.id!r} cannot be shown: {broken}.",
                hint="Leave the row out, or convert the file; the environment's limits are "
                "decode_seconds, decode_memory_mb, max_video_mb and max_megapixels.",
            ) from broken

    async def frames(self, name: str, t0: float, t1: float | None) -> Shown:
        """Frames from second `t0` to `t1` of a video, a file or a folder of pictures."""
        if pictures := pictures_in(self._folder / name):
            return await self._pictures(pictures, t0, t1)
        with _opened(self._folder, name, self._file_bytes) as (descriptor, identity):
            key = (identity, t0, t1)
            lock = self._locks.setdefault(key, asyncio.Lock())
            try:
                async with lock:  # rollouts of a group ask for the same at once
                    found = self._kept.get(key)
                    if found is None:
                        found = await self._decoded(descriptor, t0, t1)
                        self._keep(key, found)
                    self._kept.move_to_end(key)
            finally:
                if not lock.locked():
                    self._locks.pop(key, None)
        if isinstance(found, Broken):
            raise Broken(*found.args)
        return found

    async def _pictures(self, files: list[Path], t0: float, t1: float | None) -> Shown:
        rate = self._pictures_per_second
        seconds, last = len(files) / rate, len(files) - 1
        request = Request(**asdict(self._limits), start=t0, end=t1)
        times = moments(seconds, request) if t0 < seconds else []
        numbers = list(dict.fromkeys(min(int(time * rate), last) for time in times))
        names = (str(files[number].relative_to(self._folder)) for number in numbers)
        shown = await asyncio.gather(*(self.frames(name, 0.0, None) for name in names))
        pairs = zip(numbers, shown, strict=True)
        return Shown(seconds, tuple((number / rate, pair.frames[0][1]) for number, pair in pairs))

    async def _decoded(self, descriptor: int, t0: float, t1: float | None) -> Shown | Broken:
        async with self._places:
            self._decoded_parts += 1
            try:
                return await _decoded(descriptor, t0, t1, self._limits)
            except Broken as broken:
                return broken

    def _keep(self, key: Any, found: Shown | Broken) -> None:
        self._kept[key] = found
        self._size += _size(found)
        while self._size > self._kept_bytes and len(self._kept) > 1:
            self._size -= _size(self._kept.popitem(last=False)[1])


def require_av() -> None:
    if importlib.util.find_spec("av") is None:
        raise ConfigError(
            "Frames of video files need the package av.", hint=missing_module_hint("av")
        )


@contextmanager
def _opened(folder: Path, name: str, most: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    place = (folder / name).resolve()
    if not place.is_relative_to(folder.resolve()):
        raise Broken("it is not in the folder of videos")
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Broken(error.strerror or "it cannot be opened") from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise Broken("it is not a file")
        if facts.st_size > most:
            raise Broken(f"it is larger than {most >> 20} MB")
        yield descriptor, (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
    finally:
        os.close(descriptor)


def pictures_in(folder: Path) -> list[Path]:
    """Returns the pictures in a folder, ordered by name; an empty list if it is not a folder."""
    files = folder.iterdir() if folder.is_dir() else ()
    return natural(file for file in files if file.suffix.lower() in PICTURES)


async def _decoded(descriptor: int, t0: float, t1: float | None, limits: FrameLimits) -> Shown:
    request = json.dumps({"start": t0, "end": t1, **asdict(limits)})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(_PROGRAM), request),
        stdin=descriptor,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,
    )
    assert process.stdout is not None
    most = _MOST_HEAD + limits.count * limits.side**2 * _MOST_BYTES_A_PIXEL
    try:
        # Processor time is limited; this is for a process that waits, on a busy machine.
        async with asyncio.timeout(limits.cpu_seconds * 10 + _START_SECONDS):
            output = await _at_most(process.stdout, most)
            status = await process.wait()
    except TimeoutError:
        raise Broken(f"decoding it takes longer than {limits.cpu_seconds * 10} seconds") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if status == -signal.SIGXCPU or status == -signal.SIGKILL:
        raise Broken(f"decoding it takes more than {limits.cpu_seconds} seconds of processor time")
    if status:
        # A decoder that gets no memory may also crash.
        most_mb = f"{limits.memory_mb} MB of memory"
        raise Broken(f"the process that decoded it died (status {status}; it may take {most_mb})")
    return _read(output)


async def _at_most(stream: asyncio.StreamReader, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := await stream.read(1 << 16):
        size += len(part)
        if size > most:
            raise Broken("its frames are too large")
        parts.append(part)
    return b"".join(parts)


def _read(output: bytes) -> Shown:
    """Reads what the process wrote: a confined process may have been taken over, too."""
    head, _, rest = output.partition(b"\n")
    try:
        said = json.loads(head)
        if "error" in said:
            raise Broken(str(said["error"])[:300])
        frames: list[Frame] = []
        at = 0
        for frame in said["frames"]:
            data = rest[at : at + int(frame["bytes"])]
            at += len(data)
            if not data.startswith(b"\xff\xd8\xff"):
                raise Broken("its frames are damaged")
            url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
            frames.append((round(float(frame["time"]), 3), url))
        return Shown(round(float(said["seconds"]), 3), tuple(frames))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise Broken("the process that decoded it wrote an incomplete or invalid answer") from error


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9


def _size(found: Shown | Broken) -> int:
    return found.size if isinstance(found, Shown) else 1000
