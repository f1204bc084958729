"""Loads questions and the texts about their videos: the sample, files, the hub.

Rows come as in `envserver_environments.rows`. The texts about videos come from one file, by video,
or from a folder with a file for each. Files are found by the names of `VideoQuestion.names`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from envserver_environments.roles import roles_of, text_of
from envserver_environments.rows import DataSets, Hub

from envserver import ConfigError, InputError, NotFoundError
from envserver.rows.sources import every_row

from .context import CAPTIONS, MODALITIES, VideoContext, video_context
from .data_sets import ROLES, VideoQuestion
from .frames.store import SUFFIXES, pictures_in

DATA = Path(__file__).parent / "data"
SAMPLE = DATA / "questions.jsonl"
SAMPLE_VIDEOS = DATA / "videos"

HUBS: dict[str, Hub] = {
    "nextqa": Hub("lmms-lab/NExTQA", {"test": "test"}, ("MC",)),
    "egoschema": Hub("lmms-lab/egoschema", {"test": "test"}, ("Subset",)),
}
DATA_SETS = DataSets(SAMPLE, HUBS)
MAX_CONTEXT_BYTES = 16 << 20


def answers_file(path: Path | None) -> dict[str, Any]:
    """Returns answers by video or question, empty without a path: an object of them as EgoSchema's
    `subset_answers.json`, or rows of `question_id` and `answer` as ActivityNet-QA's `test_a.json`.
    """
    answers: dict[str, Any] = {}
    for row in every_row(path) if path is not None else ():
        found = roles_of(row, ROLES, {})
        is_answer = "answer" in found and "id" in found
        answers |= {text_of(found["id"]): found["answer"]} if is_answer else row
    return answers


def context_file(path: Path, fps: float = 1.0) -> VideoContext:
    """Reads the text about one video."""
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
    """The texts about videos.

    Args:
        place: a folder with `NAME.json`, `.txt`, `.srt` or `.vtt`, or one file: a JSON object by
            name, or rows with a video and its captions.
        fps: captions per second, if they are a plain list.
    """

    def __init__(self, place: Path, fps: float) -> None:
        self._fps = fps
        self._place = place
        self._folder = Folder(place)
        self._all: dict[str, Any] | None = None
        if not place.exists():
            raise NotFoundError(f"There are no captions at {str(place)!r}.")
        if place.is_file():
            value = _json_of(place) if place.suffix == ".json" else None
            self._all = value if isinstance(value, dict) else _by_video(place)

    def context(self, item: VideoQuestion) -> VideoContext | None:
        """The text about the video; None if there is none."""
        if self._all is not None:
            name = next(filter(self._all.__contains__, item.names), None)
            return None if name is None else video_context(self._all[name], self._fps)
        ends = [f"{language}{end}" for language in ("", "_en", ".en") for end in CAPTIONS]
        file = self._folder.find(
            [item.captions, *(f"{name}{end}" for name in item.names if name for end in ends)]
        )
        return None if file is None else context_file(self._place / file, self._fps)


def _by_video(place: Path) -> dict[str, Any]:
    roles = {"video": ROLES["video"], "context": (*ROLES["context"], *MODALITIES, "text")}
    found = [roles_of(row, roles, {}) for row in every_row(place)]
    if not all(len(one) == len(roles) for one in found):
        raise ConfigError(f"{place} holds no captions by video.", hint="See the room's README.")
    return {text_of(one["video"]): one["context"] for one in found}


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
