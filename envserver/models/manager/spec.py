"""Which engine is to be started: an entry of the catalogue and the user's own settings together."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from ...config import Backend, EngineConfig
from ..catalogue import ModelEntry


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An engine to be started.

    Args:
        model: a folder, or a name on the hub.
        name: what requests call it.
        port: 0: a free one.
        vllm_python: the Python that has vLLM; None: the one that we run in.
        restarts: in a row, before it is given up.
        log: file for what the engine writes; appended to.
    """

    model: str
    name: str
    backend: Backend = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    load_in_4bit: bool = False
    vllm_args: tuple[str, ...] = ()
    local_args: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    vllm_python: Path | None = None
    start_seconds: float = 900.0
    restarts: int = 5
    log: Path = Path("engine.log")


def engine_spec(entry: ModelEntry, config: EngineConfig) -> EngineSpec:
    """What `entry` says, and stronger what `config` does."""
    plain = re.sub(r"[^\w.-]+", "-", entry.name).strip("-.") or "engine"
    return EngineSpec(
        model=entry.files,
        name=entry.served_name or entry.name,
        backend=config.backend or entry.backend,
        dtype=entry.dtype,
        max_model_len=entry.max_model_len,
        load_in_4bit=entry.load_in_4bit,
        vllm_args=(*entry.vllm_args, *config.vllm_args),
        local_args=(*entry.local_args, *config.local_args),
        port=config.port,
        vllm_python=config.vllm_python,
        start_seconds=config.start_seconds,
        restarts=config.restarts,
        log=config.log or Path("data") / f"engine-{plain}.log",
    )
