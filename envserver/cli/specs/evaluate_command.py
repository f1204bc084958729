"""The settings of `envserver evaluate`."""

from __future__ import annotations

from ...running.run_settings import EvaluateSettings
from ..command_line import FREQUENT, CommandSpec

SUMMARY = """Measures a model on the tasks of an environment, of several (--env math,code) or of a
folder of them (--env DIR): mean reward, pass@k and pass^k with intervals, overall and by kind of
task, next to the environment's baselines; failures, truncations, tokens and cost. Tasks come from
the split `test` unless another is given: `--env.total_steps` of them or all, each once, with
`--env.group_size` attempts each (unset: 1 if sampling.temperature is 0). No group is filtered.
Groups and the report (report.json, report.md, report.html) are written to --out.
To compare two evaluations: envserver evaluate compare DIR DIR
To evaluate on several machines: --shard 1/4 and so on, then envserver evaluate merge DIR DIR ...
To write the report again, without a model: envserver evaluate report DIR
For tasks of lm-evaluation-harness: envserver lm-eval TASKS"""


COMMAND = CommandSpec(
    "evaluate",
    SUMMARY,
    EvaluateSettings,
    usage="--env NAME[,NAME...]|FOLDER",
    frequent=(*FREQUENT, "out", "resume", "overwrite", "pass_at", "no_baselines", "ray.address"),
    aliases={"ray": "ray.address"},
    openai_variables="openai",
)
