"""What may be set at `envserver_clients.sft` and `envserver_clients.dpo`, as flags or in a YAML
file.

In the file (configs/trl_defaults.yaml is one) `defaults` holds for both commands, `sft` and `dpo`
for one, and `presets` has named ones for `--preset`. Stronger are, in this order: flags, the
preset, the command's own, `defaults`. Names are those of the fields; without a file the defaults
here hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from envserver_records import ConfigError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from envserver_clients.training.settings import from_flags

S = TypeVar("S", bound="Settings")

ATTENTION_AND_MLP = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _names(value: Any) -> Any:
    return [one.strip() for one in value.split(",")] if isinstance(value, str) else value


class Settings(BaseModel):
    """What both commands have."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model: str
    """Folder or hub id of the model to begin with."""
    data: Path
    """A file of rows (.jsonl, .jsonl.gz, .parquet), or a folder: of `envserver sft build`: a
    model for each tool; of splits: train.jsonl, val.jsonl; or of shards as exports are written."""
    output: Path
    """Folder of the model card, metrics.jsonl and the adapter, or the whole model. An unfinished
    one goes on, a finished one is left as it is."""
    overwrite: bool = False
    """Begin anew where `output` holds another training."""
    preset: str | None = None
    """Name of one of the `presets` in the file of --config."""

    lora: bool = False
    """Train a LoRA in place of all weights."""
    lora_rank: int = Field(default=16, ge=1)
    """Its rank."""
    lora_alpha: int = Field(default=32, ge=1)
    """Its scale is this divided by the rank."""
    lora_dropout: float = Field(default=0.05, ge=0, lt=1)
    """Of its inputs."""
    lora_targets: Annotated[tuple[str, ...], BeforeValidator(_names)] = ATTENTION_AND_MLP
    """Layers that get one: ends of names, with commas between; all-linear: all but the last."""
    merged: bool = False
    """With --lora: write the whole model with the LoRA merged into it, too, below `output`."""

    learning_rate: float | None = Field(default=None, gt=0)
    """Of AdamW, after the warm-up; unset: what is usual, see configs/trl_defaults.yaml."""
    schedule: Literal["linear", "cosine", "constant_with_warmup"] = "cosine"
    """How it falls after the warm-up."""
    warmup: float = Field(default=0.03, ge=0, lt=1)
    """Share of the steps over which it rises."""
    epochs: float = Field(default=1.0, gt=0)
    """Times that each row is learned from."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps, in place of `epochs`."""
    batch_size: int = Field(default=4, ge=1)
    """Rows (pairs for DPO) that go through the model at a time."""
    accumulate: int = Field(default=4, ge=1)
    """Such batches in an optimizer step."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of AdamW."""
    most_gradient: float = Field(default=1.0, gt=0)
    """A gradient with a larger norm is cut down to this."""
    max_length: int = Field(default=2048, ge=8)
    """Tokens of a row, prompt included."""
    too_long: Literal["drop", "truncate"] = "drop"
    """What becomes of longer rows: left out, or cut off at the end. Both are counted."""
    seed: int = 0
    """Of the order of rows, the LoRA's first weights, and dropout."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What is computed with; auto: bfloat16 where a GPU has it. Weights that are trained are
    kept in float32."""
    gradient_checkpointing: bool = True
    """Compute activations twice in place of keeping them."""
    device: Literal["auto", "cpu"] = "auto"
    """cpu: leave GPUs alone."""
    threads: int | None = Field(default=None, ge=1)
    """Of torch on the CPU; unset: as torch has it."""

    checkpoint_every: int = Field(default=50, ge=1)
    """Steps from one checkpoint to the next."""
    log_every: int = Field(default=1, ge=1)
    """Steps from one line of metrics to the next."""
    validate_every: int | None = Field(default=None, ge=1)
    """Steps from one look at the validation rows to the next; unset: only at the end."""
    keep_checkpoints: bool = False
    """Leave the checkpoints below `output` when the training is done."""

    base_model: str | None = None
    """Hub id of `model` for the card, where `model` is a folder."""
    license: str | None = None
    """Of what is made, for the card."""

    @property
    def rate(self) -> float:
        """The learning rate that is used."""
        raise NotImplementedError


class SftSettings(Settings):
    """TRL's SFTTrainer on rows of `envserver export --to messages`, of `envserver sft build`, or
    with a prompt and a completion. Only what the assistant wrote is trained."""

    tool: str | None = None
    """Of a folder of `envserver sft build`: only this tool."""
    whole: bool = False
    """Of such a folder: one model from the rows of all tools."""
    turns: Literal["all", "last"] = "all"
    """Which of the assistant's turns in a conversation are trained."""
    prompts: Literal["auto", "chat", "plain"] = "auto"
    """What a prompt that is text stands for. chat: the user's turn, rendered by the chat template;
    plain: the tokens themselves; auto: plain where it has the template's special tokens in it, or
    the model has no template."""

    @property
    def rate(self) -> float:
        return self.learning_rate or (2e-4 if self.lora else 2e-5)


class DpoSettings(Settings):
    """TRL's DPOTrainer on pairs of `envserver export --to dpo`: prompt, chosen, rejected. Only what
    the assistant wrote counts."""

    beta: float = Field(default=0.1, gt=0)
    """The higher, the nearer the model stays to what it was."""
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """sigmoid is DPO's own."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """For `robust`: share of pairs that are taken to be the wrong way round."""

    @property
    def rate(self) -> float:
        return self.learning_rate or (1e-5 if self.lora else 1e-6)


def read_settings(
    kind: type[S], section: Literal["sft", "dpo"], arguments: Sequence[str] | None
) -> S:
    """Settings from a command line, and from the file that `--config` names.

    Args:
        arguments: words of the command line; None: this process's.

    Raises:
        ConfigError: the file or a value is wrong.
    """

    def chosen(file: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        return _chosen(file, section, given.get("preset"))

    return from_flags(kind, arguments, program=f"python -m clients.{section}", chosen=chosen)


def _chosen(file: dict[str, Any], section: str, preset: str | None) -> dict[str, Any]:
    unknown = sorted(set(file) - {"defaults", "sft", "dpo", "presets"})
    if unknown:
        raise ConfigError(
            f"The file of --config has {', '.join(unknown)}.",
            hint="It may have defaults, sft, dpo and presets; settings stand below these.",
        )
    presets = file.get("presets") or {}
    if preset is not None and preset not in presets:
        there = ", ".join(sorted(presets)) or "none"
        raise ConfigError(f"There is no preset {preset}: --config has {there}.")
    parts = (file.get("defaults"), file.get(section), presets[preset] if preset else None)
    return {name: value for part in parts for name, value in (part or {}).items()}
