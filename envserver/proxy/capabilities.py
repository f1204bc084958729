"""How an engine can be asked, and whether conversations can be continued by tokens there."""

from __future__ import annotations

from pathlib import Path

import msgspec
from envserver_records.errors import ConfigError

from ..config import TokensConfig
from ..models.model_files import find_model_files
from ..models.probe import ProbeResult
from ..tokens.agreement import disagreement
from ..tokens.chat_format import ChatFormat

TOKEN_MODES = ("tokens", "completions")
"""Those in which an engine takes token ids."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an engine.

    Args:
        upstream: what it was found to do.
        format: the model's chat template and tokenizer; None: nothing is continued by tokens.
        folder: where its files are, None where there are none.
        why_not: why there is no format, a sentence; "" if there is one.
    """

    probe_result: ProbeResult
    format: ChatFormat | None = None
    folder: Path | None = None
    why_not: str = ""


def capabilities_of(probe_result: ProbeResult, tokens: TokensConfig) -> Capabilities:
    """The ways of an engine. Reads the model's files, and may wait for the network.

    Raises:
        ConfigError: `tokens.tokenizer` lacks something.
    """
    if not tokens.stitch:
        return Capabilities(probe_result=probe_result, why_not="tokens.stitch is off.")
    files = find_model_files(probe_result, tokens.tokenizer)
    if probe_result.mode not in TOKEN_MODES:
        why = f"In mode {probe_result.mode} the engine takes no token ids."
        return Capabilities(probe_result=probe_result, folder=files.folder, why_not=why)
    if files.folder is None:
        return Capabilities(probe_result=probe_result, why_not=files.reason)
    try:
        format = ChatFormat.load(files.folder)
    except ConfigError as error:
        return Capabilities(probe_result=probe_result, folder=files.folder, why_not=str(error))
    why = disagreement(format, probe_result.echoes) or ""
    return Capabilities(
        probe_result=probe_result, format=None if why else format, folder=files.folder, why_not=why
    )
