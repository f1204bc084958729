"""Engines (`--engines.*`), their prices (`--prices.*`), and how their tokens are recorded
(`--tokens.*`).
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from .section import Section

_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9._-]{0,252}[a-z0-9_])?", re.IGNORECASE)


class EnginesConfig(Section):
    """Engines besides those of `openai.base_url`: registered by POST /v1/engines, or discovered."""

    routing: Literal["prefix", "least"] = "prefix"
    """Engine of a new rollout: by a hash of its id (prefix), or the one with the fewest calls
    (least). All calls of a rollout go to one engine, which has its prefix cached."""
    max_version_lag: int = Field(default=0, ge=0)
    """Policy versions that the weights of an engine may be behind the published one; an engine
    further behind gets no calls until it is current."""
    file: Path | None = None
    """Watched file that lists engines: an address per line, or a JSON object with `url` and
    `version`."""
    poll_seconds: float = Field(default=5.0, gt=0)
    """Seconds between two looks at `file`."""
    from_server: bool | None = None
    """Use the engines that the server calls (only `join`); unset: if `openai.base_url` is none."""
    allow: list[str] = []
    """Hosts at which engines may be registered: gpu1,*.gpu.local,10.0.0.0/8. Only they get
    `openai.api_key`. Unset: all but those of this machine (with access tokens), and addresses of
    cloud services; and none gets the key."""

    @field_validator("allow")
    @classmethod
    def _hosts(cls, value: list[str]) -> list[str]:
        for host in value:
            try:
                ipaddress.ip_network(host, strict=False)
            except ValueError:
                if _NAME.fullmatch(host) is None:
                    raise ValueError(
                        f"{host[:100]!r} is not a name, *.name, or a network such as 10.0.0.0/8"
                    ) from None
        return value


class PricesConfig(Section):
    """Prices of tokens; without any, no cost is recorded or shown."""

    prompt: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of a million prompt tokens; needs `prices.completion`."""
    completion: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of a million completion tokens."""
    currency: str = "USD"
    """Currency of all prices."""
    file: Path | None = None
    """YAML file `MODEL: {prompt: 0.15, completion: 0.6}`; unset: `prompt_price` and
    `completion_price` of the model's entry in `engine.models_file`."""


Edit = Literal["exact", "appended", "whitespace", "calls"]


class TokensConfig(Section):
    """How calls are continued token by token, and which calls are trained."""

    stitch: bool = True
    """Continue a conversation from its recorded tokens instead of rendering it again."""
    tokenizer: Path | None = None
    """Folder of the model's tokenizer.json and chat template; unset: found by the model's name."""
    edits: list[Edit] = ["exact", "appended", "whitespace", "calls"]
    """Changes that an agent may make to an answer it sends back without losing its tokens."""
    think: Literal["template", "keep"] = "template"
    """If the chat template removes earlier reasoning: start a new sequence without it, as in
    deployment (template), or continue one sequence that keeps all of it (keep)."""
    train: list[str] = []
    """Flags whose calls are trained, overriding the default."""
    mask: list[str] = []
    """Flags whose calls become untrained context."""
    drop: list[str] = []
    """Flags that drop the rollout."""
    max_untrained_share: float = Field(default=0.1, ge=0, le=1)
    """Largest share of the sampled tokens that flags may mask or drop. Above it, `serve` offers no
    further group with a larger share, and `process` ends with an error; 1: no limit."""
    untrained_window_groups: int = Field(default=8, ge=1)
    """Number of the latest groups that this share is taken of."""
    constraints: Literal["none", "forms", "all"] = "forms"
    """How agents may constrain what is sampled: not at all (none), by response_format, tool_choice
    and strict tools (forms), or also by logit_bias, structured_outputs and the like (all)."""
    strict_tools: Literal["drop", "keep"] = "drop"
    """`strict` of tools that an agent may call, which many SDKs send by default: drop it before a
    trained call, so that its tokens are the model's own; or keep it, and mask the call."""
    extra_fields: list[str] = []
    """Further request fields that agents may pass to the engine, unchecked."""
    max_media: int = Field(default=256, ge=0)
    """Maximum images, audio and videos in one request of an agent."""
    max_medium_mb: float = Field(default=20, gt=0)
    """Maximum size of each of them, in MB of 2**20 bytes."""
    max_media_mb: float = Field(default=40, gt=0)
    """Maximum size of all of them in one request together."""
    max_image_megapixels: float = Field(default=100, gt=0)
    """Maximum width times height of an image, in millions: the engine takes memory for each."""
    max_images_megapixels: float = Field(default=400, gt=0)
    """The same for all images of one request together."""
    audit_fraction: float = Field(default=0.0, ge=0, le=1)
    """`serve`: share of the rollouts whose logprobs the engine computes again, as a check."""
    audit_tolerance: float = Field(default=0.05, ge=0)
    """Largest logprob difference that an audit accepts as rounding."""
    experts: bool = False
    """Record which experts of a mixture-of-experts model each token went through, for trainers that
    replay them. The engine must give them: vLLM with --enable-return-routed-experts."""
    keep_calls: bool = False
    """Store every call (tokens as differences) with the sequences of a trajectory."""
