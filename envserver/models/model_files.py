"""Finds the tokenizer and chat template of a served model on this machine.

In flows a probe's result; out flows a folder, or a sentence that says why there is none and what to
do. Searched in this order: the folder that the user names; the model's own folder, if it exists on
this machine; the Hugging Face cache; the Hugging Face hub, from which only a few small files are
downloaded (not with HF_HUB_OFFLINE).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import orjson
from envserver_records.errors import ConfigError

from .probe import ProbeResult
from .probe_client import sentence

_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_FETCHED = [
    _TOKENIZER,
    _CONFIG,
    *_TEMPLATES,
    "additional_chat_templates/*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    "generation_config.json",
]
_REMEDY = "Name a folder with tokenizer.json and chat template by --tokens.tokenizer DIR."
_SIMULATED = "envserver-sim"
_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{7,64})/?$")
_PATH = re.compile(r"(?<![\w:/.-])(?:~|\.{0,2})/(?:[^\s/]+/)+([^\s/]+)")
"""A path of several parts, not one within an address."""
_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A folder with tokenizer.json and a chat template, or why there is none."""

    folder: Path | None = None
    reason: str = ""


def find_model_files(probe_result: ProbeResult, explicit: Path | None = None) -> ModelFiles:
    """Finds the files of the model that an engine serves. May wait for the network.

    Args:
        explicit: the folder that the user names.

    Raises:
        ConfigError: `explicit` lacks one of the files.
    """
    if explicit is not None:
        if lack := _lack(explicit):
            raise ConfigError(f"tokens.tokenizer: {explicit} has {lack}.")
        return ModelFiles(folder=explicit)
    if probe_result.server.startswith(_SIMULATED):
        return ModelFiles(folder=Path(__file__).with_name("sim") / "assets")
    name = probe_result.root or probe_result.model
    reasons = []
    for folder in [Path(name), *_cached(name)]:
        if folder.is_dir():
            lack = _lack(folder)
            if not lack:
                return ModelFiles(folder=folder.absolute())
            reasons.append(f"{folder} has {lack}.")
    if not reasons:
        fetched = _fetch(name)
        if fetched.folder is not None:
            return fetched
        reasons.append(fetched.reason)
    return ModelFiles(reason=f"{' '.join(reasons)} {_REMEDY}")


def find_tokenizer(name: str) -> Path:
    """Finds a tokenizer by the user's name for it: a local folder, or a model on the hub.
    Raises ConfigError: there is none.
    """
    if folder := tokenizer_here(name, Path(name)):
        return folder
    fetched = _fetch(name)
    if fetched.folder is None:
        raise ConfigError(f"--tokenizer: {fetched.reason}")
    return fetched.folder


def tokenizer_here(name: str, *folders: Path) -> Path | None:
    """Returns the first of `folders` with a tokenizer, else the one of the model in the cache."""
    places = [*folders, *_cached(name)] if name else []
    found = (folder for folder in places if (folder / _TOKENIZER).is_file())
    return next((folder.absolute() for folder in found), None)


def _lack(folder: Path) -> str:
    """Returns what is missing for rendering here, or ""."""
    if not (folder / _TOKENIZER).is_file():
        return f"no {_TOKENIZER}"
    if any((folder / name).is_file() for name in _TEMPLATES):
        return ""
    try:
        config = orjson.loads((folder / _CONFIG).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        config = {}
    found = isinstance(config, dict) and bool(config.get("chat_template"))
    return "" if found else "no chat template"


def _cached(name: str) -> Iterator[Path]:
    """Yields the model's snapshots in the Hugging Face cache: `main` first, then the newest."""
    if not _REPOSITORY.fullmatch(name):
        return
    model = _cache_folder() / f"models--{name.replace('/', '--')}"
    main = model / "refs" / "main"
    if main.is_file():
        yield model / "snapshots" / main.read_text().strip()
    snapshots = model / "snapshots"
    if snapshots.is_dir():
        yield from sorted(snapshots.iterdir(), key=_changed_at, reverse=True)


def _changed_at(folder: Path) -> float:
    return folder.stat().st_mtime


def _cache_folder() -> Path:
    """Returns huggingface_hub's cache: HF_HUB_CACHE, else in HF_HOME, else in the user's cache."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{user}/huggingface"
    return Path(os.path.expanduser(home), "hub")  # noqa: PTH111 - as the hub, also without a home


def _fetch(name: str) -> ModelFiles:
    """Downloads the files from the Hugging Face hub; only for names such as owner/model."""
    if "/" not in name or not _REPOSITORY.fullmatch(name):
        return ModelFiles(reason=f"{name} is not a folder on this machine.")
    try:
        import httpx
        from huggingface_hub import snapshot_download
    except ImportError:
        return ModelFiles(reason=f"{name} is neither on this machine nor in its cache.")
    try:
        folder = Path(snapshot_download(name, allow_patterns=_FETCHED))
    except (OSError, ValueError, httpx.HTTPError) as error:
        words = str(error).strip().partition("\n")[0]
        return ModelFiles(reason=sentence(f"{name} cannot be downloaded: {words}"))
    lack = _lack(folder)
    return ModelFiles(reason=f"{name} has {lack}.") if lack else ModelFiles(folder=folder)


def without_folders(text: str) -> str:
    """Returns `text` with only the last part of each path in it: what may leave this machine."""
    return _PATH.sub(r"\1", text)


def model_source(root: str | None, folder: Path | None = None) -> dict[str, str]:
    """Returns the name of the files that an engine serves, and their revision if the path has it.

    Args:
        root: a name on the hub or a path, as the engine reports it; of a path only the last part
            is used.
        folder: where its tokenizer was found here.
    """
    if not root:
        return {}
    for path in (root, str(folder or "")):
        found = _SNAPSHOT.search(path)
        if found is not None and root in (path, f"{found[1]}/{found[2]}"):
            return {"source": f"{found[1]}/{found[2]}", "revision": found[3]}
    is_path = root.startswith(("/", ".", "~", "\\")) or root.count("/") > 1 or "\\" in root
    return {"source": re.split(r"[/\\]", root.rstrip("/\\"))[-1] if is_path else root}
