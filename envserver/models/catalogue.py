"""Looks up models by name in `configs/models.yaml`, and finds the files of served models.

A folder or a hub name (`owner/name`) needs no entry.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import orjson
from envserver_records.errors import ConfigError, NotFoundError
from pydantic import Field, ValidationError, field_validator, model_validator

from ..folders import shipped
from ..settings.config import Backend
from ..settings.section import Section
from .probe import ProbeResult, sentence

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class ModelEntry(Section):
    """A model that can be started by its name."""

    name: str = Field(min_length=1)
    hf_id: str | None = None
    path: Path | None = None
    """Folder with its files, in place of `hf_id`."""
    backend: Backend = "auto"
    """vllm, local, or auto: vLLM if it is installed and starts, else local; "transformers" is
    another name for local."""
    dtype: Dtype = "auto"
    """Data type of the weights."""
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    load_in_4bit: bool = False
    """Quantise to 4 bits with bitsandbytes."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Maximum tokens of prompt and answer together; default: the model's own."""
    served_name: str | None = None
    """Model name in requests; default: its name here."""
    prompt_price: float | None = Field(default=None, ge=0)
    """Prices are of a million tokens, for the costs in records and tables."""
    completion_price: float | None = Field(default=None, ge=0)
    default_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables that the engine gives to every chat template: `{enable_thinking: false}`."""
    vllm_args: tuple[str, ...] = ()
    local_args: tuple[str, ...] = ()

    @field_validator("backend", mode="before")
    @classmethod
    def _as_others_say(cls, value: object) -> object:
        return "local" if value == "transformers" else value

    @model_validator(mode="after")
    def _is_somewhere(self) -> ModelEntry:
        if (self.hf_id is None) == (self.path is None):
            raise ValueError("give either hf_id or path")
        return self

    @property
    def files(self) -> str:
        return self.hf_id or os.fspath(self.path or "")

    @property
    def sampling(self) -> dict[str, Any]:
        """Default sampling settings, under the names of `sampling.*`."""
        chosen = self.model_dump(include={"max_tokens", "temperature", "top_p"})
        return {name: value for name, value in chosen.items() if value is not None}


def read_catalogue(path: Path) -> dict[str, ModelEntry]:
    """Reads the entries of a file (see `shipped`), by name; {} if there is no file."""
    import yaml  # runs without `--model NAME` start without it

    try:
        tree = yaml.safe_load(shipped(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    models = tree.get("models") if isinstance(tree, dict) else None
    if isinstance(models, dict):
        models = [{"name": name, **(entry or {})} for name, entry in models.items()]
    if not isinstance(models, list):
        raise ConfigError(f"{path} has no list `models`.")
    entries: dict[str, ModelEntry] = {}
    for number, raw in enumerate(models, 1):
        entry = _entry(raw, f"{path}, model {number}")
        if entry.name in entries:
            raise ConfigError(f"{path} has two models {entry.name!r}.")
        entries[entry.name] = entry
    return entries


def find_model(name: str, catalogue: dict[str, ModelEntry], place: Path) -> ModelEntry:
    """The entry `name`, or a new one for the folder or hub model that it means."""
    entry = catalogue.get(name) or _unlisted(name)
    if entry is None:
        near = difflib.get_close_matches(name, catalogue, n=1, cutoff=0.5)
        known = f"Known in {place}: {', '.join(catalogue)}." if catalogue else f"{place} has none."
        raise NotFoundError(
            f"There is no model {name!r}.",
            hint=f"Did you mean {near[0]!r}?" if near else f"{known} Or name a folder.",
        )
    if entry.path is not None and not (entry.path / "config.json").is_file():
        lack = "no config.json" if entry.path.is_dir() else "no such folder"
        raise NotFoundError(
            f"The model {name!r} is not at {entry.path}: {lack}.",
            hint=f"`envserver models tiny {entry.path}` makes a tiny one.",
        )
    return entry


def _unlisted(name: str) -> ModelEntry | None:
    if Path(name).is_dir() or name.startswith((".", "/", "~")):
        folder = Path(name).expanduser()
        return ModelEntry(name=folder.resolve().name, path=folder)
    if name.count("/") == 1 and all(name.split("/")):
        return ModelEntry(name=name, hf_id=name)
    return None


def _entry(raw: object, place: str) -> ModelEntry:
    name = raw.get("name") if isinstance(raw, dict) else None
    where = f"{place} ({name})" if name else place
    try:
        return ModelEntry.model_validate(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, fault["loc"]))
        known = difflib.get_close_matches(field, ModelEntry.model_fields, n=1)
        unknown = fault["type"] == "extra_forbidden"
        reason = "there is no such setting" if unknown else fault["msg"]
        raise ConfigError(
            f"{where}: {f'{field}: ' if field else ''}{reason.removeprefix('Value error, ')}.",
            hint=f"Did you mean {known[0]!r}?" if unknown and known else "",
        ) from error


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
_REMEDY = "Set --tokens.tokenizer to a folder with tokenizer.json and chat template."
_SIMULATED = "envserver-sim"
_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{7,64})/?$")
_PATH = re.compile(r"(?<![\w:/.-])(?:~|\.{0,2})/(?:[^\s/]+/)+([^\s/]+)")
"""A path of several parts, not one within an address."""
_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A folder with tokenizer.json and a chat template, or why there is none and what to do."""

    folder: Path | None = None
    reason: str = ""


def find_model_files(probe_result: ProbeResult, explicit: Path | None = None) -> ModelFiles:
    """Finds the files of the model that an engine serves. May wait for the network.

    Searched in this order: `explicit`, the folder that the user names; the model's own folder, if
    it exists on this machine; the Hugging Face cache; the Hugging Face hub, from which only a few
    small files are downloaded (not with HF_HUB_OFFLINE).
    """
    if explicit is not None:
        if lack := _lack(explicit):
            raise ConfigError(f"tokens.tokenizer: {explicit} has {lack}.")
        return ModelFiles(folder=explicit)
    if probe_result.server.startswith(_SIMULATED):
        from envserver_local.simulated import ASSETS

        return ModelFiles(folder=ASSETS)
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
    """`name`: a local folder, or a model on the hub."""
    if folder := tokenizer_here(name, Path(name)):
        return folder
    fetched = _fetch(name)
    if fetched.folder is None:
        raise ConfigError(f"--tokenizer: {fetched.reason}")
    return fetched.folder


def tokenizer_here(name: str, *folders: Path) -> Path | None:
    """The first of `folders` with a tokenizer, else the one of the model in the cache."""
    places = [*folders, *_cached(name)] if name else []
    found = (folder for folder in places if (folder / _TOKENIZER).is_file())
    return next((folder.absolute() for folder in found), None)


def _lack(folder: Path) -> str:
    """What is missing for rendering here, or ""."""
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
        yield from sorted(snapshots.iterdir(), key=lambda path: -path.stat().st_mtime)


def _cache_folder() -> Path:
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
    """`text` with only the last part of each path: what may leave this machine."""
    return _PATH.sub(r"\1", text)


def model_source(root: str | None, folder: Path | None = None) -> dict[str, str]:
    """The name of the files that an engine serves, and their revision if known.

    `root` is a name on the hub or a path (of which the last part is used), as the engine reports
    it; `folder` is where its tokenizer was found here.
    """
    if not root:
        return {}
    for path in (root, str(folder or "")):
        found = _SNAPSHOT.search(path)
        if found is not None and root in (path, f"{found[1]}/{found[2]}"):
            return {"source": f"{found[1]}/{found[2]}", "revision": found[3]}
    is_path = root.startswith(("/", ".", "~", "\\")) or root.count("/") > 1 or "\\" in root
    return {"source": re.split(r"[/\\]", root.rstrip("/\\"))[-1] if is_path else root}
