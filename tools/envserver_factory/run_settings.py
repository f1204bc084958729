"""Settings of the commands that run a model: `sft-gen` and `lm-eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from envserver.settings.config import (
    EngineConfig,
    LogFormat,
    LogLevel,
    OpenAIConfig,
    PricesConfig,
    Settings,
    SimConfig,
)
from envserver.settings.section import Section


class SftSettings(Settings):
    filepath: Path = Path("sft_data.jsonl")
    """JSONL file for the rows. Can be given as the first argument."""
    tokenizer: str | None = None
    """Folder or name of the model's tokenizer; not needed with --save-messages."""
    save_messages: bool = False
    """Save conversations instead of the decoded text of the tokens."""
    save_top_n_per_group: int = Field(default=3, ge=1)
    """Maximum number of rows from one group."""
    num_seqs_to_save: int = Field(default=100, ge=1)
    """Number of rows to write before stopping."""
    allow_negative_scores: bool = False
    """Also keep rows with a score of 0 or less."""
    minimum_score_diff_max_min: float = Field(default=0.0, ge=0)
    """Minimum difference between a row's score and the lowest score of its group."""
    append_to_previous: bool = False
    """Append to an existing file."""


class LmEvalSettings(Section):
    tasks: list[str]
    """Tasks or task groups of the harness (`lm_eval ls tasks`). Can be given as the first
    argument."""
    openai: OpenAIConfig = OpenAIConfig()
    model: str | None = None
    """Model to start an engine for (a name in `engine.models_file`, a folder, a name on the
    hub), or "sim" for the simulated engine; unset: the engine at `openai.base_url`."""
    engine: EngineConfig = EngineConfig()
    sim: SimConfig = SimConfig()
    out: Path | None = None
    """Folder for results and report; may be the folder of an evaluation; unset:
    runs/lm-eval/<time>."""
    resume: bool = False
    """Continue in a folder that has these tasks, without repeating answered requests."""
    overwrite: bool = False
    """Run tasks again that the folder already has."""
    api: Literal["chat", "completions"] = "chat"
    """API used for the engine. Tasks that compare likelihoods of answers need completions, an
    engine that echoes prompt logprobs, and `tokenizer`."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Few-shot examples in each prompt; unset: the task's default."""
    limit: float | None = Field(default=None, gt=0)
    """Number of documents of each task, or a fraction of them (below 1); unset: all."""
    include_path: Path | None = None
    """Folder with additional tasks in YAML."""
    gen_kwargs: str = ""
    """Sampling arguments that replace the task's: temperature=0.6,max_gen_toks=2048."""
    system_instruction: str = ""
    """System prompt; unset: none."""
    tokenizer: str = ""
    """Folder or hub name of the model's tokenizer, for `completions`."""
    concurrency: int = Field(default=8, ge=1)
    """Maximum number of concurrent requests."""
    metric: str | None = None
    """Metric used as the reward: exact_match, or exact_match,strict-match with its filter;
    unset: for each task the first metric that is a mean of values from 0 to 1."""
    python: Path | None = None
    """Python interpreter that has lm-evaluation-harness; unset: the one that runs envserver."""
    args: tuple[str, ...] = ()
    """Additional arguments for the harness's command line."""
    pass_at: float = Field(default=1.0, gt=0, le=1)
    """Minimum value of the metric at which a document passes."""
    prices: PricesConfig = PricesConfig()
    log_level: LogLevel = "warning"
    """Minimum log level."""
    log_format: LogFormat = "auto"
    """Format of log lines; auto: console. json is for log collectors."""
