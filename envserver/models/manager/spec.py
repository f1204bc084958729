"""Combines an entry of the catalogue with the user's settings into the engine to start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from ...config import Backend, EngineConfig
from ..catalogue import ModelEntry


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An engine to start.

    Args:
        model: a folder, or a name on the hub.
        name: the model's name in requests.
        template_kwargs: default variables of the chat template.
        port: 0 for a free one.
        vllm_python: the Python that has vLLM; None: this one.
        restarts: maximum number in a row.
        log: file to which the engine's output is appended.
    """

    model: str
    name: str
    backend: Backend = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    load_in_4bit: bool = False
    template_kwargs: dict[str, Any] = {}
    vllm_args: tuple[str, ...] = ()
    local_args: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    vllm_python: Path | None = None
    start_seconds: float = 900.0
    restarts: int = 5
    log: Path = Path("engine.log")


def engine_spec(entry: ModelEntry, config: EngineConfig) -> EngineSpec:
    """Combines `entry` with `config`, which takes precedence."""
    plain = re.sub(r"[^\w.-]+", "-", entry.name).strip("-.") or "engine"
    return EngineSpec(
        model=entry.files,
        name=entry.served_name or entry.name,
        backend=config.backend or entry.backend,
        dtype=entry.dtype,
        max_model_len=entry.max_model_len,
        load_in_4bit=entry.load_in_4bit,
        template_kwargs=entry.default_template_kwargs,
        vllm_args=(*entry.vllm_args, *config.vllm_args),
        local_args=(*entry.local_args, *config.local_args),
        port=config.port,
        vllm_python=config.vllm_python,
        start_seconds=config.start_seconds,
        restarts=config.restarts,
        log=config.log or Path("data") / f"engine-{plain}.log",
    )
