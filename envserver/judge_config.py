"""`--judge.*`: the model that scorers may ask."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, model_validator

from .described import Section
from .environment_config import ApiKey


class JudgeConfig(Section):
    """The model that `score` and `score_group` may ask (`self.judge`)."""

    base_url: str | None = None
    """Address of the judge's engine, an OpenAI-compatible server; unset: no judge."""
    model_name: str = "default"
    """Name of the judge's model there; "default": the first one listed."""
    api_key: ApiKey = SecretStr("")
    """API key of the judge's engine; it stays in the server: never logged, written or sent to a
    scorer."""
    timeout: float = Field(default=120.0, gt=0)
    """Timeout in seconds of one answer, its repetitions after failures included."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature."""
    max_tokens: int = Field(default=1024, ge=1)
    """Maximum length of one answer, in tokens."""
    max_concurrent: int = Field(default=16, ge=1)
    """Maximum calls in flight; further ones wait."""
    cache: Path | None = None
    """SQLite file of answers by content, shared by all commands that name it; unset: judge.db in
    the folder of the output, the store or the first source."""
    cache_mb: int = Field(default=1024, ge=1)
    """Size of that file at which the oldest tenth of its answers is dropped, in MB."""
    prompt_price: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of a million prompt tokens; needs `judge.completion_price`."""
    completion_price: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of a million completion tokens."""
    currency: str = "USD"
    """Currency of both prices."""

    @model_validator(mode="after")
    def _prices_go_together(self) -> JudgeConfig:
        if (self.prompt_price is None) != (self.completion_price is None):
            raise ValueError("prompt_price and completion_price go together")
        return self
