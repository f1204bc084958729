"""Looks up models by name in `configs/models.yaml`.

In: a file, and what the user typed. Out: an entry that says where the model's files are and how to
serve it. A folder or a hub name (`owner/name`) needs no entry.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, Literal

from envserver_records.errors import ConfigError, NotFoundError
from pydantic import Field, ValidationError, field_validator, model_validator

from ..config import Backend, Section
from ..shipped import shipped

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class ModelEntry(Section):
    """A model that can be started by its name."""

    name: str = Field(min_length=1)
    """The name that the user types."""
    hf_id: str | None = None
    """Name on the Hugging Face hub."""
    path: Path | None = None
    """Folder with its files, in place of `hf_id`."""
    backend: Backend = "auto"
    """vllm, local, or auto: vLLM if it is installed and starts, else local; transformers, as others
    say, is local."""
    dtype: Dtype = "auto"
    """Data type of the weights."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Default maximum tokens of an answer."""
    temperature: float | None = Field(default=None, ge=0)
    """Default sampling temperature."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Default nucleus sampling probability."""
    load_in_4bit: bool = False
    """Quantise to 4 bits with bitsandbytes."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Maximum tokens of prompt and answer together; default: the model's own."""
    served_name: str | None = None
    """Model name in requests; default: its name here."""
    prompt_price: float | None = Field(default=None, ge=0)
    """Price of a million prompt tokens, for the costs in records and tables."""
    completion_price: float | None = Field(default=None, ge=0)
    """Price of a million completion tokens."""
    default_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables that the engine gives to every chat template: `{enable_thinking: false}`."""
    vllm_args: tuple[str, ...] = ()
    """Further arguments for vLLM's command line."""
    local_args: tuple[str, ...] = ()
    """Further arguments for the local engine's command line."""

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
        """The path or hub name passed to engines."""
        return self.hf_id or os.fspath(self.path or "")

    @property
    def sampling(self) -> dict[str, Any]:
        """Default sampling settings, under the names of `sampling.*`."""
        chosen = self.model_dump(include={"max_tokens", "temperature", "top_p"})
        return {name: value for name, value in chosen.items() if value is not None}


def read_catalogue(path: Path) -> dict[str, ModelEntry]:
    """Reads the entries of a file (see `shipped`), by name; {} if there is no file.
    Raises ConfigError: it is malformed; the message names the entry and the fault.
    """
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
    """Returns the entry `name`, or a new one for the folder or hub model that it means.

    Args:
        place: the catalogue's file, for messages.

    Raises:
        NotFoundError: it is unknown (the message has the nearest name), or its folder is missing.
    """
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
            hint=f"A tiny one is made by `envserver models tiny {entry.path}`.",
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
        one = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, one["loc"]))
        said = one["msg"].removeprefix("Value error, ")
        known = difflib.get_close_matches(field, ModelEntry.model_fields, n=1)
        unknown = one["type"] == "extra_forbidden"
        raise ConfigError(
            f"{where}: {f'{field}: ' if field else ''}"
            f"{'there is no such setting' if unknown else said}.",
            hint=f"Did you mean {known[0]!r}?" if unknown and known else "",
        ) from error
