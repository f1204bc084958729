"""The settings of `envserver verify`."""

from __future__ import annotations

from ...running.run_settings import VerifySettings
from ..command_line import ENGINE, CommandSpec

SUMMARY = """Checks that delivered tokens are what the engine sampled: reads a JSONL file of
`process` or the groups of a running server (without leasing any), has the engine score the rows
again (prompt_logprobs), and compares ids, masks and logprobs. Exit status 0: all is correct; 1:
there are differences, or nothing could be compared; 2: the command line is wrong."""


COMMAND = CommandSpec(
    "verify",
    SUMMARY,
    VerifySettings,
    usage="FILE|ADDRESS",
    arguments=("source",),
    frequent=("source", *ENGINE, "tolerance", "policy_version", "sample", "concurrency", "as_json"),
)
