"""Loads questions and the texts about their videos: the sample, files, the hub.

Rows come as in `envserver_environments.rows`. The texts about videos come from one JSON file by
video, or from a folder with a file for each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from envserver_environments.rows import DataSets, Hub

from envserver import ConfigError, InputError, NotFoundError

from .context import VideoContext, video_context

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
    """Returns answers by video, as in EgoSchema's `subset_answers.json`; empty without a path."""
    if path is None:
        return {}
    value = _json_of(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object of answers by video.")
    return value


def context_file(path: Path, fps: float = 1.0) -> VideoContext:
    """Reads the text about one video from a .txt or .json file.

    Raises:
        NotFoundError: there is no such file.
        InputError: it has another suffix, is too large, or cannot be read.
    """
    if not path.is_file():
        raise NotFoundError(f"There is no file {str(path)!r}.")
    if path.suffix not in (".txt", ".json"):
        raise InputError(f"{path.name} is neither .txt nor .json.")
    if path.stat().st_size > MAX_CONTEXT_BYTES:
        raise InputError(f"{path.name} is larger than {MAX_CONTEXT_BYTES >> 20} MB.")
    data = path.read_bytes()
    try:
        value = data.decode("utf-8") if path.suffix == ".txt" else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path.name} cannot be read: {error}") from error
    return video_context(value, fps)


class Videos:
    """The texts about videos, by the videos' names.

    Args:
        place: a folder with `NAME.json` or `NAME.txt`, or one JSON file by name.
        fps: captions per second, if they are a plain list.

    Raises:
        NotFoundError: there is nothing at `place`.
        ConfigError: the file is not a JSON object.
    """

    def __init__(self, place: Path, fps: float) -> None:
        self._place = place
        self._fps = fps
        self._all: dict[str, Any] | None = None
        if not place.exists():
            raise NotFoundError(f"There are no captions at {str(place)!r}.")
        if place.is_file():
            value = _json_of(place)
            if not isinstance(value, dict):
                raise ConfigError(f"{place} holds no JSON object of captions by video.")
            self._all = value

    def has(self, name: str) -> bool:
        """Whether there is a text about the video."""
        return name in self._all if self._all is not None else self._file(name) is not None

    def context(self, name: str) -> VideoContext:
        """Raises InputError where nothing is known of the video, or it cannot be read."""
        if self._all is not None:
            if name not in self._all:
                raise InputError("nothing is known of its video")
            return video_context(self._all[name], self._fps)
        file = self._file(name)
        if file is None:
            raise InputError("nothing is known of its video")
        return context_file(file, self._fps)

    def _file(self, name: str) -> Path | None:
        for suffix in (".json", ".txt"):
            file = self._place / f"{name}{suffix}"
            # A name comes from a data set: it stays in the folder.
            if name and file.parent == self._place and file.is_file():
                return file
        return None


def _json_of(path: Path) -> Any:
    if not path.is_file():
        raise NotFoundError(f"There is no file {str(path)!r}.")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
