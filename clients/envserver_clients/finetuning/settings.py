"""Settings of `envserver_clients.sft` and `envserver_clients.dpo`, as flags or in a YAML file.

In the file (such as configs/trl_defaults.yaml) `defaults` applies to both commands, `sft` and `dpo`
to one, and `presets` has named settings for `--preset`. Precedence: flags, the preset, the
command's section, `defaults`, then the defaults here. Names are those of the fields.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from envserver_records import ConfigError, ConflictError, EnvserverError, InputError
from envserver_records.extras import CLIENTS, install_command
from envserver_records.tasks import Json
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from rich.console import Console

from envserver_clients.training.settings import end_at_sigterm, from_flags

S = TypeVar("S", bound="FinetuneSettings")

ATTENTION_AND_MLP = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _names(value: Any) -> Any:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


class FinetuneSettings(BaseModel):
    """Settings of both commands."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model: str
    """Folder or hub id of the base model."""
    data: Path
    """A file of rows (.jsonl, .jsonl.gz, .parquet), or a folder: of `envserver sft build` (a model
    for each tool), of splits (train.jsonl, val.jsonl), or of an export's shards."""
    output: Path
    """Folder for the model card, metrics.jsonl and the adapter or model. An unfinished training
    continues; a finished one stays as it is."""
    overwrite: bool = False
    """Start again if `output` contains another training."""
    preset: str | None = None
    """Name of a preset in the file of --config."""

    lora: bool = False
    """Train a LoRA instead of all weights."""
    lora_rank: PositiveInt = 16
    """Rank of the LoRA."""
    lora_alpha: PositiveInt = 32
    """The LoRA's scale times its rank."""
    lora_dropout: float = Field(default=0.05, ge=0, lt=1)
    """Dropout of the LoRA's inputs."""
    lora_targets: Annotated[tuple[str, ...], BeforeValidator(_names)] = ATTENTION_AND_MLP
    """Layers with a LoRA: name suffixes, separated by commas; all-linear: all except the last."""
    load_in_4bit: bool = False
    """With --lora: keep the frozen base in 4 bits (QLoRA: NF4, double quantisation). Needs
    bitsandbytes; runs on CPUs, too."""
    merged: bool = False
    """With --lora: also save the whole model with the LoRA merged into it, below `output`."""

    learning_rate: PositiveFloat | None = None
    """AdamW's learning rate after the warm-up. Default: see configs/trl_defaults.yaml."""
    schedule: Literal["linear", "cosine", "constant_with_warmup"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup: float = Field(default=0.03, ge=0, lt=1)
    """Fraction of the steps over which the learning rate rises."""
    epochs: PositiveFloat = 1.0
    """Passes over the rows."""
    steps: PositiveInt | None = None
    """Optimizer steps, instead of `epochs`."""
    batch_size: PositiveInt = 4
    """Rows (for DPO pairs) per forward pass."""
    accumulate: PositiveInt = 4
    """Batches per optimizer step."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    most_gradient: PositiveFloat = 1.0
    """Maximum gradient norm; larger gradients are clipped."""
    max_length: int = Field(default=2048, ge=8)
    """Maximum tokens of a row, including the prompt."""
    too_long: Literal["drop", "truncate"] = "drop"
    """What to do with longer rows: leave them out, or cut off their end. Both are counted."""
    seed: int = 0
    """Seed of the row order, the LoRA's initial weights and dropout."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type for computing; auto: bfloat16 if the GPU supports it. Trained weights are kept in
    float32."""
    gradient_checkpointing: bool = True
    """Compute activations twice instead of storing them."""
    device: Literal["auto", "cpu"] = "auto"
    """cpu: do not use GPUs."""
    threads: PositiveInt | None = None
    """CPU threads of torch. Default: torch's own."""

    checkpoint_every: PositiveInt = 50
    """Steps between checkpoints."""
    log_every: PositiveInt = 1
    """Steps between lines of metrics."""
    validate_every: PositiveInt | None = None
    """Steps between validations. Default: only at the end."""
    keep_checkpoints: bool = False
    """Keep the checkpoints below `output` after the training."""

    base_model: str | None = None
    """Hub id of `model` for the card, if `model` is a folder."""
    license: str | None = None
    """License of the result, for the card."""

    @property
    def rate(self) -> float:
        raise NotImplementedError


class SftSettings(FinetuneSettings):
    """Trains with TRL's SFTTrainer on rows of `envserver export --to messages`, of `envserver sft
    build`, or with a prompt and a completion. Trains only what the assistant wrote."""

    tool: str | None = None
    """Only this tool of a folder of `envserver sft build`."""
    whole: bool = False
    """One model from the rows of all tools of such a folder."""
    turns: Literal["all", "last"] = "all"
    """Which turns of the assistant are trained."""
    packing: bool = False
    """Put short rows together into rows of up to `max_length` tokens, which do not see each other.
    `batch_size` then counts these."""
    check_calls: NonNegativeInt = 32
    """Maximum number of held-out tool calls that the model writes before and after the training, to
    count valid ones."""
    prompts: Literal["auto", "chat", "plain", "recorded"] = "auto"
    """Meaning of a text prompt. chat: the user's turn, rendered by the chat template; plain: the
    exact text; auto: plain if it contains special tokens or the model has no template. recorded:
    no text at all, but `tokens` and `mask` of `envserver export --to parquet`: exactly the tokens
    that the proxy recorded, of which the sampled ones are trained. Only for models with the
    tokenizer that made them."""

    @property
    def rate(self) -> float:
        return self.learning_rate or (2e-4 if self.lora else 2e-5)


class DpoSettings(FinetuneSettings):
    """Trains with TRL's DPOTrainer on pairs of `envserver export --to dpo`: prompt, chosen,
    rejected. Only what the assistant wrote counts."""

    beta: PositiveFloat = 0.1
    """A higher value keeps the model closer to its initial weights."""
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """Loss function; sigmoid is the original DPO."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """For `robust`: assumed fraction of pairs in the wrong order."""

    @property
    def rate(self) -> float:
        return self.learning_rate or (1e-5 if self.lora else 1e-6)


def read_settings(
    kind: type[S], section: Literal["sft", "dpo"], arguments: Sequence[str] | None
) -> S:
    def chosen(file: Json, given: Json) -> Json:
        return _chosen(file, section, given.get("preset"))

    return from_flags(
        kind, arguments, program=f"python -m envserver_clients.{section}", chosen=chosen
    )


def _chosen(file: Json, section: str, preset: str | None) -> Json:
    unknown = sorted(set(file) - {"defaults", "sft", "dpo", "presets"})
    if unknown:
        raise ConfigError(
            f"The file of --config has {', '.join(unknown)}.",
            hint="It may have defaults, sft, dpo and presets; put settings below these.",
        )
    presets = file.get("presets") or {}
    if preset is not None and preset not in presets:
        there = ", ".join(sorted(presets)) or "none"
        raise ConfigError(f"Preset {preset} does not exist: --config has {there}.")
    parts = (file.get("defaults"), file.get(section), presets[preset] if preset else None)
    return {name: value for part in parts for name, value in (part or {}).items()}


_NEEDED = ("torch", "transformers", "trl", "peft", "datasets", "jsonschema")


def check_libraries(settings: FinetuneSettings) -> None:
    missing = [name for name in _NEEDED if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(
            f"Training needs {', '.join(missing)}, which this Python does not have.",
            hint=install_command("train", CLIENTS),
        )
    if not settings.load_in_4bit:
        return
    if not settings.lora:
        raise ConfigError(
            "--load-in-4bit needs --lora: weights in 4 bits cannot be trained themselves.",
            hint="Add --lora, or leave --load-in-4bit out.",
        )
    if not importlib.util.find_spec("bitsandbytes"):
        raise ConfigError(
            "--load-in-4bit needs bitsandbytes, which this Python does not have.",
            hint=install_command("qlora", CLIENTS),
        )


def run_command(
    train: Callable[[Sequence[str] | None, Console], None], arguments: Sequence[str] | None
) -> int:
    """Runs a command. Exit status: 0 done, 2 wrong settings or rows, 1 other errors, 130 after
    Ctrl-C. In every case the same command continues."""
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, end_at_sigterm)
    _quiet()
    try:
        train(arguments, console)
    except (ConfigError, ConflictError, InputError) as error:
        tell(console, error)
        return 2
    except EnvserverError as error:
        tell(console, error)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped; the same command continues from the last checkpoint.")
        return 130
    return 0


def tell(console: Console, error: EnvserverError) -> None:
    """Prints an error in red; its text is not markup: `envserver[train]` keeps its brackets."""
    console.print("envserver:", style="red", end=" ")
    console.print(error.message, error.hint, markup=False, highlight=False, soft_wrap=True)


def _quiet() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
