"""The settings of `envserver sft-gen`."""

from __future__ import annotations

from ...running.run_settings import SftSettings
from ..command_line import FREQUENT, CommandSpec

SUMMARY = """Runs rollouts of one environment and writes the best of each group as rows for
supervised training: {"messages", "score"}, or {"prefix", "completion", "score"}."""


ALIASES = {"group_size": "env.group_size", "max_token_len": "env.max_token_length"}


COMMAND = CommandSpec(
    "sft-gen",
    SUMMARY,
    SftSettings,
    usage="FILE --env NAME",
    arguments=("filepath",),
    aliases=ALIASES,
    frequent=(*FREQUENT, "filepath", "tokenizer", "save_messages", "num_seqs_to_save"),
)
