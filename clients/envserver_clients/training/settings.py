"""The trainer's settings, as flags or in a YAML file; flags take precedence.

`micro_batch_tokens` is the flag `--micro-batch-tokens`; the file uses the fields' names.
"""

from __future__ import annotations

import argparse
import ctypes
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, Self, TypeVar

import yaml
from envserver_records import ConfigError, EnvserverError
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from rich.console import Console

from .advantages import AdvantageSettings, Baseline, Scaling
from .examples import Denominator, ExampleSettings
from .guard import GuardSettings
from .objectives import Correction, KlForm, Level, LossSettings, Schedule, Surrogate, preset

S = TypeVar("S", bound=BaseModel)
Values = dict[str, Any]
_PARENT_DIED: Final = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def _weights(given: object) -> object:
    if not isinstance(given, str):
        return given
    pairs = [part.partition("=") for part in given.split(",") if part.strip()]
    return {name.strip(): weight for name, _, weight in pairs}


def _names(given: object) -> object:
    return [item for item in given.split(",") if item] if isinstance(given, str) else given


class TrainerSettings(BaseModel):
    """Trains with GRPO: gets groups from a server and transfers weights to the engine."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    server: str = "http://127.0.0.1:8000"
    """Address of `envserver serve`."""
    engine: str = "http://127.0.0.1:9001"
    """Address of the engine; of several, with commas. With sent weights "server": those of the
    server's GET /v1/engines, also ones that come later."""
    engine_kind: Literal["local", "vllm"] = "local"
    """Kind of engine."""
    model: str
    """Folder or hub id of the initial model, which the engine serves."""
    output: Path
    """Folder for checkpoints, weights, metrics.jsonl, curves.png. An existing one is continued."""
    wire: Literal["native", "atropos"] = "native"
    """Protocol for groups; the Atropos API does not report policy versions."""
    run: str = "grpo"
    """Name of this trainer's run at the server."""
    environments: Annotated[list[str], BeforeValidator(_names)] = []
    """Names of the server's environments to learn from, with commas; others stay for other
    trainers. Default: all."""
    token: str = ""
    """Access token of the server. Default: the variable ENVSERVER_TOKEN."""

    steps: PositiveInt | None = None
    """Number of batches to learn from, including those before a restart. Default: no limit."""
    minutes: PositiveFloat | None = None
    """Stop after this time, counted from this start."""
    until_reward: float | None = None
    """Stop when the mean reward of the last `window` steps is at least this."""
    window: PositiveInt = 10
    """Number of steps for the mean reward of `until_reward` and the console."""
    idle_minutes: PositiveFloat = 10.0
    """Stop with an error after this time without a batch."""
    seed: int = 0
    """Seed of LoRA's initial weights and of shuffled rewards."""

    groups: PositiveInt = 8
    """Groups per batch, which is one optimizer step."""
    dynamic_sampling: bool = False
    """Learn from batches that are full of groups that teach: groups whose rewards are all equal are
    set aside and replaced by others (DAPO). The server does the same for all its trainers by
    --env.ensure_scores_are_not_same."""
    group_size: PositiveInt = 8
    """Trajectories per group; only used by the Atropos API."""
    max_tokens: PositiveInt = 8192
    """Maximum tokens of a row; only used by the Atropos API."""
    max_staleness: int | None = Field(default=4, ge=0)
    """Groups with a token that is more versions behind are left out and counted."""

    # The objective.
    objective: str = ""
    """Name of a preset for the settings below, or several joined by +, such as dapo+tis; settings
    that are given take precedence. grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp,
    reinforce_pp_baseline, gdpo, dual_clip, tis, icepop, sequence_tis, sequence_mis, opsm. Default:
    the defaults below, which are GRPO with a higher upper bound and IcePop's mask."""
    advantage: Scaling = "std"
    """std: divide by the group's standard deviation (GRPO); mean: do not (Dr. GRPO)."""
    baseline: Baseline = "group"
    """Compare a reward with the mean of its group, of the others in it (leave_one_out, RLOO), or
    with nothing (none)."""
    whiten: bool = False
    """Subtract the batch's mean advantage and divide by its standard deviation (REINFORCE++)."""
    turn_discount: float | None = Field(default=None, ge=0, le=1)
    """Learn each turn from its own return: its reward and those of later turns, each turn later
    weighed by this. 1: undiscounted. Default: every turn learns from the trajectory's reward."""
    reward_weights: Annotated[dict[str, float], BeforeValidator(_weights)] = {}
    """Weights of named rewards, such as correct=1,format=0.5: each is compared in the group by
    itself (GDPO). Default: the reward as it is."""
    overlong_tokens: PositiveInt | None = None
    """Longest desired answer, in trained tokens: the last `overlong_buffer` of them lower the
    reward by up to `overlong_penalty` (DAPO). Default: no such penalty."""
    overlong_buffer: PositiveInt = 4096
    """Number of tokens over which that penalty rises."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Largest such penalty."""
    denominator: Denominator = "trajectory"
    """Equal weight per trajectory (GRPO) or token (DAPO), or a constant (Dr. GRPO)."""
    constant_tokens: PositiveInt = 512
    """Tokens per trajectory for the constant denominator."""
    skip_equal: bool = False
    """Leave groups whose rewards are all equal out of the denominators, too (DAPO)."""
    surrogate: Surrogate = "clip"
    """Bounds of the importance ratio: clip (PPO) or cispo, which keeps every token's gradient."""
    ratio_level: Level = "token"
    """Importance ratios of single tokens, or of whole rows (sequence, GSPO)."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Maximum decrease of an importance ratio below 1."""
    clip_high: NonNegativeFloat = 0.28
    """Maximum increase of it above 1."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Maximum ratio of a token whose advantage is negative (dual-clip PPO: 3). Default: none."""
    decoupled: bool = False
    """Bound each update relative to the policy before it, and correct by a weight for tokens that
    an older policy sampled."""
    correction: Correction = "mask"
    """Tokens whose logprob before the step is far from the delivered one are left out (mask,
    IcePop), weigh at most `most_correction` (truncate), or weigh what they weigh (none)."""
    correction_level: Level = "token"
    """Weights of single tokens, or of whole rows (sequence)."""
    least_correction: NonNegativeFloat = 0.5
    """With `mask`: minimum of that weight."""
    most_correction: PositiveFloat | None = None
    """Maximum of that weight. Default: 5 (mask) or 2 (truncate)."""
    off_policy_bound: PositiveFloat | None = None
    """Leave out rows with a negative advantage whose tokens became less likely by more nats on
    average since they were sampled (DeepSeek-V3.2). Default: no such bound."""
    kl_weight: NonNegativeFloat = 0.0
    """Weight of the distance to the initial model; 0: keep no reference."""
    kl_form: KlForm = "k3"
    """Estimate of that distance: k1, k2, k3, k3 times the importance ratio (k3_ratio, TRL's), or k3
    with the gradient of k2 (k3+, verl's)."""
    entropy_weight: NonNegativeFloat = 0.0
    """Weight of the entropy of each token's distribution, which is rewarded; 0: only measured."""
    # Trust in the engine's logprobs.
    warn_mismatch: PositiveFloat = 0.1
    """Warn if the logprobs of engine and trainer differ by more nats per token on average."""
    most_mismatch: PositiveFloat = 0.5
    """Do not learn from a batch if they differ by more than this."""
    patience: PositiveInt = 3
    """Stop with an error after so many batches in a row whose data are refused."""
    waste_patience: PositiveInt = 12
    """Stop with an error after so many batches in a row that teach nothing: all rewards of each
    group are equal, all rows are cut off or stale, or the server dropped that many groups."""
    learn_truncated: bool = False
    """Also take a gradient from trajectories that were cut off."""
    shuffle_rewards: bool = False
    """Shuffle the rewards within each group: a control run, which must not learn."""

    learning_rate: PositiveFloat = 1e-5
    """AdamW's learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 5
    """Updates over which the learning rate rises."""
    schedule: Schedule = "constant"
    """The learning rate after that: constant, or falling (linear, cosine)."""
    schedule_steps: PositiveInt | None = None
    """Updates until it has fallen to `least_rate`. Default: those of `steps`."""
    least_rate: NonNegativeFloat = 0.0
    """The learning rate at the end of the schedule."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    most_gradient: PositiveFloat = 1.0
    """Maximum gradient norm; larger gradients are clipped."""
    updates: PositiveInt = 1
    """Optimizer updates per batch."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens per forward pass and rank, including padding; gradients of a batch are added up."""
    packed: bool = False
    """Compute several short rows in one line, which is as long as the longest row: less padding."""
    reduce_each: bool = False
    """With several ranks, add up their gradients after each forward pass, not once per update: no
    rank holds a whole gradient, and more is sent."""
    lora_rank: NonNegativeInt = 0
    """Rank of a LoRA to train instead of all weights; 0: train all weights."""
    lora_alpha: PositiveFloat | None = None
    """The LoRA's product is multiplied by this divided by its rank. Default: twice the rank."""
    lora_targets: str = "all-linear"
    """Names of the linear layers with a LoRA, such as q_proj,v_proj; all-linear: all but the
    last."""
    device: str = "cpu"
    """Device: cpu, cuda, cuda:1, ...; with several ranks cuda is each rank's own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of computing and of saved weights; trained weights and the optimizer are float32."""
    replay_experts: bool = False
    """Route each token to the experts that the engine chose, which the server must record
    (`--tokens.experts`); for mixture-of-experts models."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, a third more time."""
    threads: PositiveInt | None = None
    """CPU threads of torch. Default: torch's own."""

    checkpoint_every: PositiveInt = 1
    """Steps between checkpoints. After a restart later steps are repeated."""
    keep_checkpoints: PositiveInt = 3
    """Number of last checkpoints to keep."""
    publish_every: PositiveInt = 1
    """Steps between transfers of weights to the engine."""
    # Weights to the engines
    weights: Literal["files", "gloo", "nccl"] = "files"
    """How all weights reach the engines: by files on a disk that they share with the trainer, or
    sent over the network: gloo (TCP, from the CPU) or nccl (between GPUs). LoRA uses files."""
    weights_address: str = ""
    """This machine's address as engines see it, for sent weights. Default: the one that reaches
    each engine."""
    in_flight: Literal["drain", "keep", "abort"] = "keep"
    """What happens to running model calls while weights change: they end first (drain), continue
    with the new weights (keep; each token has its version), or are repeated (abort)."""
    check_tolerance: PositiveFloat | None = None
    """Maximum difference of a logprob between engine and trainer after a transfer. Default: 0.02,
    with bfloat16 0.2."""
    tensorboard: bool = False
    """Also write metrics for TensorBoard, below `output`."""
    tracker: Literal["none", "trackio", "wandb", "mlflow"] = "none"
    """Also log metrics to trackio, Weights & Biases or MLflow (offline unless you logged in)."""
    project: str = "envserver"
    """Project name at the tracker."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> Self:
        last = self.last_update
        if self.schedule == "constant":
            if self.schedule_steps is not None or self.least_rate:
                raise ValueError("schedule constant has no schedule_steps or least_rate")
        elif not last:
            raise ValueError(f"schedule {self.schedule} needs schedule_steps or steps")
        elif last <= self.warmup_steps:
            raise ValueError(
                f"schedule {self.schedule} ends with update {last}, within the warm-up of "
                f"{self.warmup_steps}"
            )
        if self.least_rate > self.learning_rate:
            raise ValueError("least_rate is above learning_rate")
        return self

    @model_validator(mode="after")
    def _what_needs_something_else(self) -> Self:
        if self.dynamic_sampling and self.wire == "atropos":
            raise ValueError("dynamic_sampling needs the native API, which can set groups aside")
        if "gdpo" in self.objective.split("+") and not self.reward_weights:
            raise ValueError("objective gdpo needs reward_weights, such as correct=1,format=0.5")
        sends = self.weights != "files" and not self.lora_rank
        if self.engine.strip() == "server" and not (sends and self.wire == "native"):
            raise ValueError(
                "engine server needs weights gloo or nccl, wire native and no LoRA: only weights "
                "that are sent reach the server's own engines"
            )
        return self

    @property
    def last_update(self) -> int:
        """Number of the update that has `least_rate`; 0: unknown."""
        return self.schedule_steps or (self.steps or 0) * self.updates

    @model_validator(mode="before")
    @classmethod
    def _of_objective(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("objective"):
            return {**preset(str(given["objective"])), **given}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.loss()
        self.examples()
        return self

    def of(self, kind: type[Any]) -> Values:
        """The values of the settings that the dataclass `kind` has, too."""
        names = {field.name for field in fields(kind)} & type(self).model_fields.keys()
        return {name: getattr(self, name) for name in names}

    def loss(self) -> LossSettings:
        """Raises ConfigError: the settings contradict each other."""
        return LossSettings(**self.of(LossSettings))

    def guard(self) -> GuardSettings:
        return GuardSettings(**self.of(GuardSettings))

    def examples(self, vocabulary: int | None = None) -> ExampleSettings:
        """Raises ConfigError: the settings contradict each other."""
        return ExampleSettings(
            **self.of(ExampleSettings),
            advantages=AdvantageSettings(**self.of(AdvantageSettings), scaling=self.advantage),
            keep_zero=not self.loss().is_reward_only,
            vocabulary=vocabulary,
        )


def from_flags(
    kind: type[S],
    arguments: Sequence[str] | None,
    *,
    program: str,
    chosen: Callable[[Values, Values], Values] | None = None,
) -> S:
    """Reads settings from a command line, which may name a YAML file with `--config`.

    `chosen` selects the values of a file with several sections, given its content and the flags.
    Raises ConfigError: the file or a value is wrong. A wrong flag ends the program with its usage.
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
        problems = [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        ]
        raise ConfigError("; ".join(problems), hint=f"{program} --help") from error


def run_command(
    kind: type[S],
    run: Callable[[S, Console], int | None],
    arguments: Sequence[str] | None,
    *,
    program: str,
    hint: str = " ",
) -> int:
    """Runs a command with its settings. Exit status: 1 after an error, 130 after Ctrl-C.

    `hint`: what stands between an error's message and its hint.
    """
    console = Console()
    try:
        return run(from_flags(kind, arguments, program=program), console) or 0
    except EnvserverError as error:
        console.print(f"[red]{error.message}[/]{hint}{error.hint}", highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130


def end_at_sigterm(number: int, frame: object) -> NoReturn:
    """Handles SIGTERM like Ctrl-C, so that everything is closed and all processes are ended."""
    raise SystemExit(128 + number)


def end_with_parent() -> None:
    """The kernel ends this process when the one that started it has died."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGTERM)


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
