"""`envserver sft-gen`, with the flags of `atropos-sft-gen`, which asks a server instead."""

from __future__ import annotations

from functools import partial

from envserver.cli import lean_imports
from envserver.cli.command_line import FREQUENT, CommandSpec, read_run_spec
from envserver.telemetry.redaction import counted

from ..run_settings import SftSettings

_SUMMARY = """Runs rollouts of one environment and writes the best of each group as rows for
supervised training: {"messages", "score"}, or {"prefix", "completion", "score"}."""

COMMAND = CommandSpec(
    "sft-gen",
    _SUMMARY,
    SftSettings,
    usage="FILE --env NAME",
    arguments=("filepath",),
    aliases={"group_size": "env.group_size", "max_token_len": "env.max_token_length"},
    frequent=(*FREQUENT, "filepath", "tokenizer", "save_messages", "num_seqs_to_save"),
)


def run(argv: list[str]) -> int:
    with lean_imports():
        from envserver.cli.console import Console
        from envserver.cli.loop import SignalStop, run_loop, show_logs
        from envserver.cli.progress import ProgressView

        from ..sft_gen import generate

    line = read_run_spec(COMMAND, argv)
    show_logs(line.settings)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    stop = SignalStop(partial(console.print, markup=False))
    show = partial(ProgressView, console)
    made = run_loop(generate(line, line.make_environment(), show, stop))
    rows = f"{counted(made.rows, 'row')} of {counted(made.groups, 'group')}"
    console.print(f"{rows} in {line.settings.filepath}", markup=False)
    return 0 if made.ending == "done" else 130
