"""The settings of `envserver models probe`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from ...config import LogFormat, LogLevel, OpenAIConfig, Section
from ...tokens_config import TokensConfig
from ..command_line import CommandSpec

SUMMARY = """Sends about a dozen tiny requests to an engine and shows what it can do: how exactly
its tokens can be recorded, what is missing, and how to fix it. Several addresses (separated by
commas) are probed one by one, and their differences are shown."""


class ProbeSettings(Section):
    """Settings of `models probe`."""

    url: list[str] = Field(default_factory=list)
    """Addresses of engines, with or without `http://`; unset: those of openai.base_url."""
    log_level: LogLevel = "error"
    """Minimum log level."""
    log_format: LogFormat = "auto"
    """Format of log lines; auto: console. json is for log collectors."""
    as_json: bool = Field(default=False)
    """Print JSON instead of a table."""
    openai: OpenAIConfig = OpenAIConfig()
    tokens: TokensConfig = TokensConfig()

    @model_validator(mode="before")
    @classmethod
    def _addresses(cls, values: dict[str, Any]) -> dict[str, Any]:
        urls = [url.strip() for url in ",".join(values.get("url") or []).split(",") if url.strip()]
        if not urls:
            return values
        whole = [url if "://" in url else f"http://{url}" for url in urls]
        return {**values, "openai": {**values.get("openai", {}), "base_url": whole}}


COMMAND = CommandSpec("models probe", SUMMARY, ProbeSettings, usage="URL...", arguments=("url",))
