"""The settings of `envserver models probe`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from ...config import LogLevel, OpenAIConfig, Section, TokensConfig
from ..command_line import CommandSpec

SUMMARY = """Asks an engine about a dozen tiny things and shows what it can do: how exactly its
tokens can be recorded, what is missing, and what to do about it. Several addresses (separated by
commas) are probed one by one; where they differ is shown."""


class ProbeSettings(Section):
    """The settings that `models probe` has."""

    url: list[str] = Field(default_factory=list)
    """Addresses of engines, `http://` may be left out; unset: those of openai.base_url."""
    log_level: LogLevel = "error"
    """Least serious event that is logged."""
    as_json: bool = Field(default=False)
    """JSON, not a table."""
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
