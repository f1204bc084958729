"""An engine's capabilities, and whether conversations can be continued by token ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from envserver_records.errors import ConfigError

from ..models.model_files import find_model_files
from ..models.probe import ProbeResult
from ..tokens.agreement import agreeing
from ..tokens.chat_format import ChatFormat
from ..tokens_config import TokensConfig

TOKEN_MODES = ("tokens", "completions")
"""Modes in which an engine takes token ids."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The capabilities of an engine.

    Args:
        probe_result: what the probe found.
        format: the model's chat template and tokenizer; None: calls are not continued by ids.
        folder: the folder with its files, or None.
        why_not: a sentence that says why there is no format, or "".
    """

    probe_result: ProbeResult
    format: ChatFormat | None = None
    folder: Path | None = None
    why_not: str = ""


def capabilities_of(
    probe_result: ProbeResult,
    tokens: TokensConfig,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Capabilities:
    """Returns the capabilities of an engine. Reads the model's files; may wait for the network.

    Args:
        template_kwargs: the engine's default template variables; None: they are found.

    Raises:
        ConfigError: `tokens.tokenizer` lacks something, or the engine gives no routed experts and
            `tokens.experts` asks for them.
    """
    if tokens.experts and not probe_result.routed_experts:
        raise no_experts()
    if not tokens.stitch:
        return Capabilities(probe_result=probe_result, why_not="tokens.stitch is off.")
    files = find_model_files(probe_result, tokens.tokenizer)
    if probe_result.mode not in TOKEN_MODES:
        why = f"In mode {probe_result.mode} the engine does not take token ids."
        return Capabilities(probe_result=probe_result, folder=files.folder, why_not=why)
    if files.folder is None:
        return Capabilities(probe_result=probe_result, why_not=files.reason)
    try:
        format = ChatFormat.load(files.folder)
    except ConfigError as error:
        return Capabilities(probe_result=probe_result, folder=files.folder, why_not=str(error))
    agreed, why = agreeing(format, probe_result.echoes, template_kwargs)
    return Capabilities(probe_result=probe_result, format=agreed, folder=files.folder, why_not=why)


def no_experts() -> ConfigError:
    """Returns the error for an engine that gives no routed experts."""
    return ConfigError(
        "tokens.experts is on, but this engine gives no routed experts.",
        hint="Start vLLM with --enable-return-routed-experts: for a mixture of experts, on a GPU.",
    )
