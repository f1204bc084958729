"""What may be set at the trainer, as flags or in a YAML file; a flag is stronger than the file.

Each field is a flag: `micro_batch_tokens` is `--micro-batch-tokens`. Names in the file are those of
the fields.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from envserver_records import ConfigError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .advantages import Scaling
from .examples import Denominator

S = TypeVar("S", bound=BaseModel)
Values = dict[str, Any]
"""By name of the setting."""


class Settings(BaseModel):
    """A GRPO trainer: groups from a server, plain torch, weights to the engine."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    server: str = "http://127.0.0.1:8000"
    """Address of `envserver serve`."""
    engine: str = "http://127.0.0.1:9001"
    """Address of the engine that gets the weights."""
    engine_kind: Literal["local", "vllm"] = "local"
    """What the engine is."""
    model: str
    """Folder or hub id of the model to begin with: the one that the engine serves."""
    output: Path
    """Folder of checkpoints, weights, metrics.jsonl, curves.png. There is one: it goes on."""
    wire: Literal["native", "atropos"] = "native"
    """How groups are got; over Atropos's wire nothing says how old they are."""
    run: str = "grpo"
    """Name of this trainer's run at the server."""
    token: str = ""
    """Access token of the server; unset: the variable ENVSERVER_TOKEN."""

    steps: int | None = Field(default=None, ge=1)
    """Batches to learn from, those before a restart included; unset: no such limit."""
    minutes: float | None = Field(default=None, gt=0)
    """Stop after so long, counted from this start."""
    until_reward: float | None = None
    """Stop when the mean reward of the last `window` steps is at least this."""
    window: int = Field(default=10, ge=1)
    """Steps over which the reward is averaged, there and in the console."""
    idle_minutes: float = Field(default=10.0, gt=0)
    """Stop with an error when no batch came for so long."""
    seed: int = 0
    """Of what is random here: LoRA's first weights, shuffled rewards."""

    groups: int = Field(default=8, ge=1)
    """Groups in a batch: one optimizer step."""
    group_size: int = Field(default=8, ge=1)
    """Trajectories in a group: only Atropos's wire, which counts those, has to be told."""
    max_tokens: int = Field(default=8192, ge=1)
    """Longest row: only told to Atropos's wire."""
    max_staleness: int | None = Field(default=4, ge=0)
    """Groups with a token that is more versions behind are not learned from, but counted."""

    advantage: Scaling = "std"
    """std: divided by the group's standard deviation (GRPO); mean: not (Dr. GRPO)."""
    denominator: Denominator = "trajectory"
    """Equal weight per trajectory (GRPO) or token (DAPO), or a constant (Dr. GRPO)."""
    constant_tokens: int = Field(default=512, ge=1)
    """The constant: tokens per trajectory."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """How far a token's importance weight may fall below 1."""
    clip_high: float = Field(default=0.28, ge=0)
    """How far it may rise above 1."""
    decoupled: bool = False
    """Bound each update relative to the policy before it, and weigh tokens by how much likelier
    that one made them than the policy that sampled them."""
    most_correction: float = Field(default=2.0, gt=0)
    """With `decoupled`: the highest such weight (truncated importance sampling)."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Of the distance to the model as it was at the beginning; 0: no reference is kept."""
    learn_truncated: bool = False
    """Take a gradient from trajectories that were cut off, too."""
    shuffle_rewards: bool = False
    """Deal out the rewards within each group by chance: a control, which must learn nothing."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Of AdamW, after the warm-up."""
    warmup_steps: int = Field(default=5, ge=0)
    """Updates over which it rises."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of AdamW."""
    most_gradient: float = Field(default=1.0, gt=0)
    """A gradient with a larger norm is cut down to this."""
    updates: int = Field(default=1, ge=1)
    """Optimizer updates from each batch."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens, padding included, that go through the model at a time."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of a LoRA that is trained in place of all weights; 0: all weights are."""
    device: str = "cpu"
    """Where it computes: cpu, cuda, cuda:1, ..."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights here."""
    threads: int | None = Field(default=None, ge=1)
    """Of torch on the CPU; unset: as torch has it."""

    checkpoint_every: int = Field(default=1, ge=1)
    """Steps from one checkpoint to the next. What came after the last one is learned again."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """The last ones that stay."""
    publish_every: int = Field(default=1, ge=1)
    """Steps from one set of weights for the engine to the next."""
    in_flight: Literal["drain", "keep", "abort"] = "keep"
    """What becomes of model calls while weights change: they end first, go on with the new ones
    (each token knows its version), or are asked again."""
    check_tolerance: float = Field(default=0.02, gt=0)
    """Largest difference of a logprob between engine and trainer after new weights."""
    tensorboard: bool = False
    """Write metrics for TensorBoard, too, below `output`."""
    tracker: Literal["none", "trackio", "wandb"] = "none"
    """Give the metrics to trackio or Weights & Biases, too."""
    project: str = "envserver"
    """Name of the project there."""


def from_flags(
    kind: type[S],
    arguments: Sequence[str] | None,
    *,
    program: str,
    chosen: Callable[[Values, Values], Values] | None = None,
) -> S:
    """Settings from a command line, which may name a YAML file with `--config`.

    Args:
        arguments: words of the command line; None: this process's.
        chosen: of a file with several sections: what holds, given its content and the flags.

    Raises:
        ConfigError: the file or a value is wrong. A wrong flag ends the program with its usage.
    """
    parser = argparse.ArgumentParser(prog=program, description=kind.__doc__)
    parser.add_argument("--config", type=Path, help="YAML file with the names of the flags")
    for name, field in kind.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        default = "" if field.is_required() or field.default is None else f" [{field.default}]"
        how: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": name}
        how["help"] = f"{field.description}{default}".replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **how)
        else:
            parser.add_argument(flag, metavar=name.rpartition("_")[2].upper(), **how)
    given = vars(parser.parse_args(arguments))
    file = _from_file(given.pop("config"))
    try:
        return kind.model_validate({**(chosen(file, given) if chosen else file), **given})
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise ConfigError("; ".join(problems), hint=f"{program} --help") from error


def _from_file(path: Path | None) -> Values:
    if path is None:
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold names and values.")
    return found
