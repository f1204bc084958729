"""Settings of the record of tokens (`--tokens.*`); part of the tree in `config`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from .described import Section

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
