"""The settings of `envserver lm-eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ...config import EngineConfig, LogLevel, OpenAIConfig, Section, SimConfig
from ...running.run_settings import PricesConfig
from ..command_line import CommandSpec

SUMMARY = """Runs tasks of lm-evaluation-harness (gsm8k, aime24, ifeval ...) against an engine and
writes their results like those of `evaluate`: a report with intervals, that `evaluate compare`
takes; in the folder of an evaluation (--out) they become part of its report. The harness downloads
the data of its tasks itself; it is an extra: pip install 'envserver[lm-eval]'."""


class LmEvalSettings(Section):
    """The settings that `lm-eval` has."""

    tasks: list[str]
    """Tasks or groups of tasks of the harness (`lm_eval ls tasks`); may be the first word."""
    openai: OpenAIConfig = OpenAIConfig()
    model: str | None = None
    """A model to start an engine for (a name in `engine.models_file`, a folder, a name on the
    hub), or "sim" for the simulated engine; unset: the engine at `openai.base_url`."""
    engine: EngineConfig = EngineConfig()
    sim: SimConfig = SimConfig()
    out: Path | None = None
    """Folder for results and report, also that of an evaluation; unset: runs/lm-eval/<time>."""
    resume: bool = False
    """Go on in a folder that has these tasks: answers that are there are not asked for again."""
    overwrite: bool = False
    """Run tasks anew that the folder has."""
    api: Literal["chat", "completions"] = "chat"
    """How the engine is asked. Tasks that compare likelihoods of answers need completions, an
    engine that echoes logprobs of prompts, and `tokenizer`."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples in each prompt; unset: as the task says."""
    limit: float | None = Field(default=None, gt=0)
    """Documents of each task (a number), or a share of them (below 1); unset: all."""
    include_path: Path | None = None
    """Folder with further tasks in YAML."""
    gen_kwargs: str = ""
    """How answers are sampled, where not as the task says: temperature=0.6,max_gen_toks=2048."""
    system_instruction: str = ""
    """System prompt; unset: none."""
    tokenizer: str = ""
    """Folder or hub name of the model's tokenizer, for `completions`."""
    concurrency: int = Field(default=8, ge=1)
    """Calls in flight."""
    metric: str | None = None
    """Which metric is the reward: exact_match, or exact_match,strict-match with its filter; unset:
    of each task the first that is a mean of values from 0 to 1."""
    python: Path | None = None
    """The Python that has lm-evaluation-harness; unset: the one that envserver runs in."""
    args: tuple[str, ...] = ()
    """Further words for the harness's command line."""
    pass_at: float = Field(default=1.0, gt=0, le=1)
    """Least value of the metric at which a document passes."""
    prices: PricesConfig = PricesConfig()
    log_level: LogLevel = "warning"
    """Least serious event that is logged."""


COMMAND = CommandSpec("lm-eval", SUMMARY, LmEvalSettings, usage="TASKS", arguments=("tasks",))
