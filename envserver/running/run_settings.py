"""The settings of each run, beside those that all of them share (`config.Settings`).

The command line and the Python API take the same names; each field's docstring is its help text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ..config import (
    EngineConfig,
    EnvironmentSettings,
    LogLevel,
    MixSettings,
    OpenAIConfig,
    SandboxConfig,
    Section,
    Settings,
)
from ..evaluation_config import Failures, Truncated


class PricesConfig(Section):
    """Prices of tokens; a report without any shows no cost."""

    prompt: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of a million prompt tokens; needs `prices.completion`."""
    completion: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of a million completion tokens."""
    currency: str = "USD"
    """Currency of all prices."""
    file: Path | None = None
    """YAML file `MODEL: {prompt: 0.15, completion: 0.6}`; unset: `prompt_price` and
    `completion_price` of the model's entry in `engine.models_file`."""


class ProcessSettings(MixSettings):
    """Settings with the flags that only `process` has."""

    resume: bool = False
    """Go on with an output file that exists: its groups are not made again."""
    overwrite: bool = False
    """Replace an output file that exists."""


class EvaluateSettings(MixSettings):
    """Settings with the flags that only `evaluate` has."""

    out: Path | None = None
    """Folder for groups and report; unset: runs/evaluate/<environment>-<time>."""
    resume: bool = False
    """Go on in a folder that exists (--out): its groups are not made again, the report is."""
    overwrite: bool = False
    """Replace what a folder holds."""
    pass_at: float = Field(default=1.0, gt=0, le=1)
    """Least reward of an attempt that passes."""
    failures: Failures = "drop"
    """Attempts that were lost by our fault are left out (drop), or count as 0 (zero)."""
    truncated: Truncated = "score"
    """Attempts in which the model was cut off count what they scored (score), 0 (zero), or are left
    out (drop)."""
    no_baselines: bool = False
    """Do not run the environment's baselines."""
    prices: PricesConfig = PricesConfig()


class ScoreSettings(EnvironmentSettings):
    """The settings that `score` has."""

    input: Path
    """JSONL file of rows to score."""
    out: Path
    """JSONL file for the scores; one that exists is replaced at the end."""
    processes: int = Field(default=2, ge=1)
    """Rows that are scored at a time, each in a process."""
    sandbox: SandboxConfig = SandboxConfig()


class RescoreSettings(EnvironmentSettings):
    """The settings that `rescore` has."""

    source: list[str] = Field(default_factory=list)
    """Files of `process` (plain, .gz, .zst), folders of them, a store, or a running server; may
    stand first, without the flag."""
    rubric: str | None = None
    """Class that scores instead of the environment: path/to/file.py:Class."""
    out: Path
    """JSONL file for the groups with their new scores."""
    resume: bool = False
    """Go on with a file that exists: what stands in it is not scored again."""
    overwrite: bool = False
    """Replace a file that exists."""
    skip_bad: bool = False
    """Pass over lines that are no groups, and count them."""
    without_messages: bool = False
    """Score rollouts that were written without their conversations by their output alone."""
    processes: int = Field(default=2, ge=1)
    """Rollouts that are scored at a time, each in a process."""
    sandbox: SandboxConfig = SandboxConfig()


class ReplaySettings(Settings):
    """Settings with the flags that only `replay` has."""

    source: list[str]
    """File of `process`, folder of such, a store, or a running server; may stand first."""
    rollout: str
    """Id of the rollout."""
    services: Literal["auto", "record", "live"] = "auto"
    """Who answers what the agent asks the environment's services: the record, or they themselves;
    auto: the record where calls were kept (`--tokens.keep_calls true` of `process`)."""
    debug: bool = False
    """Run the agent in this process, stopped in pdb at its first line; without a time limit."""
    without_walls: bool = False
    """Let --debug run agents that execute the model's code in their own process: what the model
    wrote then runs in this process."""


class VerifySettings(Section):
    """The settings that `verify` has."""

    source: str
    """JSONL file, or address of a running server (http://127.0.0.1:8000); may be the first word."""
    openai: OpenAIConfig = OpenAIConfig()
    model: str | None = None
    """A model to start an engine for (a name in `engine.models_file`, a folder, a name on the
    hub), or "sim" for groups of the simulated engine; unset: the engine at `openai.base_url`."""
    engine: EngineConfig = EngineConfig()
    tolerance: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    """Largest difference of a logprob that passes. In float32 on a CPU vLLM says the very same
    numbers again for rows of up to some 480 tokens, and beyond that differs by 1e-5, the order of
    its sums; on a GPU kernels and batches differ, so set what you take for rounding, such as 0.05.
    0: only what is exactly equal passes. How many are exactly equal is told in any case."""
    policy_version: int | None = Field(default=None, ge=-1)
    """The version of the policy that the engine serves now: only rows that it sampled are compared.
    Unset: the newest of the file, or the one published at the server."""
    sample: str | None = None
    """Compare only a share of the rows (1% or 0.01), or a number of them (20); unset: all."""
    seed: int = 0
    """Which rows a sample holds: the same seed, the same rows."""
    concurrency: int = Field(default=1, ge=1)
    """Requests to the engine at a time. More is faster, but what is computed in one batch with
    others may differ in its last digits."""
    as_json: bool = False
    """Print the report as one JSON object."""
    log_level: LogLevel = "warning"
    """Least serious event that is logged."""
