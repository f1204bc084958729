"""The settings of an environment and of its agents, `--env.*`: all that workers and scorers import
of the settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from envserver_records.tasks import Split
from pydantic import AfterValidator, Field, SecretStr, field_validator

from .section import Section


def _of_one_line(key: SecretStr) -> SecretStr:
    """Returns the key without blanks around it, which a file's last line break is."""
    text = key.get_secret_value().strip()
    if not text.isprintable():
        raise ValueError("a key must be one line without control characters")
    return SecretStr(text)


ApiKey = Annotated[SecretStr, AfterValidator(_of_one_line)]


class AgentConfig(Section):
    """Settings of one agent (`--env.agents.NAME.*`); unset fields follow the run's settings."""

    model_name: str | None = None
    """Model name, on the run's engine or at `base_url`; "default": the first one listed."""
    base_url: str | None = None
    """Address of the agent's own engine, an OpenAI-compatible server."""
    api_key: ApiKey = SecretStr("")
    """API key of the agent's own engine; never logged, written or sent to a worker."""
    server_type: Literal["vllm", "openai"] = "vllm"
    """Type of the agent's own engine. vllm: returns token ids and logprobs; openai: text only."""
    timeout: float = Field(default=1200.0, gt=0)
    """Timeout in seconds of one call to the agent's own engine."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling; 1: off."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum length of one answer, in tokens."""
    trained: bool | None = None
    """Whether the agent's tokens are trained; unset: the environment decides."""

    @field_validator("base_url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            value = value.strip().rstrip("/")
            check_url(value)
        return value


class EnvironmentConfig(Section):
    """Base class of an environment's `Config`; its fields are `--env.*`."""

    group_size: int = Field(default=4, ge=1)
    """Rollouts per group: attempts at one task whose rewards are compared."""
    total_steps: int | None = Field(default=None, ge=1)
    """Groups to make, of a mix in total; unset: each task once in `process`, endless in `serve`."""
    split: Split = "train"
    """Split of the tasks: train, validation or test."""
    seed: int = 0
    """Seed for choosing and ordering tasks."""
    data_path_to_save_groups: Path | None = None
    """JSONL file that groups are written to; unset: data/<environment>.jsonl."""
    include_messages: bool = True
    """Write the conversations next to the tokens."""
    include_actions: bool = False
    """Write the agents' recorded actions next to the tokens."""
    include_experts: bool = False
    """Write the routed experts of each row next to the tokens, if `tokens.experts` records them."""
    ensure_scores_are_not_same: bool | None = None
    """Drop groups whose rewards are all equal; unset: yes in `serve`, no in `process`."""
    max_token_length: int = Field(default=8192, ge=1)
    """Maximum length of a training sequence, in tokens; groups with a longer one are dropped."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum model calls per rollout (per agent, in a multi-agent rollout)."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens sampled per rollout, over all trained calls; unset: no limit."""
    worker_timeout: float = Field(default=240.0, gt=0)
    """Time limit of a rollout in seconds of wall time, from start to result."""
    score_range: Literal["unit", "pm1"] = "unit"
    """Reward range in Atropos groups: [0, 1] (unit) or mapped to [-1, 1] (pm1)."""
    agents: dict[str, AgentConfig] = {}
    """Model, engine and sampling of single agents in a multi-agent rollout."""


def check_url(url: str) -> None:
    """Raises ValueError: `url` is not the address of a server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("an address must look like http://host:port/v1")
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError("the port must be a number from 0 to 65535") from error
    if parts.query or parts.fragment:
        raise ValueError("an address must not have a query or a fragment")
