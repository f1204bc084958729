"""The settings of `envserver sft-gen`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ...config import Settings
from ..command_line import FREQUENT, CommandSpec

SUMMARY = """Runs rollouts of one environment and writes the best of each group as rows for
supervised training: {"messages", "score"}, or {"prefix", "completion", "score"}."""


class SftSettings(Settings):
    """Settings of `sft-gen`."""

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
