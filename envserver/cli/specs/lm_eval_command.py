"""The settings of `envserver lm-eval`."""

from __future__ import annotations

from ...running.run_settings import LmEvalSettings
from ..command_line import ENGINE, CommandSpec

SUMMARY = """Runs tasks of lm-evaluation-harness (gsm8k, aime24, ifeval ...) against an engine
and writes the results in the format of `evaluate`: a report with intervals that `evaluate
compare` can read. In the folder of an evaluation (--out) they become part of its report. The
harness downloads the data of its tasks itself; it is the extra `lm-eval`."""


COMMAND = CommandSpec(
    "lm-eval",
    SUMMARY,
    LmEvalSettings,
    usage="TASKS",
    arguments=("tasks",),
    frequent=(
        *("tasks", *ENGINE, "out", "resume", "overwrite", "api", "tokenizer", "num_fewshot"),
        *("limit", "concurrency", "metric", "pass_at"),
    ),
    openai_variables="openai",
)
