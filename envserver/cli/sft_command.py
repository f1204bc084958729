"""`envserver sft-gen FILE`: rows for supervised training, of the best rollouts of an environment.

It has the flags of Atropos' `atropos-sft-gen`, which fetches rollouts from a server; this command
makes them, by `running.sft_generating`.
"""

from __future__ import annotations

from functools import partial

from ..running.sft_generating import generate
from ..running.tally import counted
from .command_line import read_run_spec
from .console import Console
from .logs import show_logs
from .loop import run_loop
from .progress import ProgressView
from .signals import SignalStop
from .specs.sft_command import COMMAND


def run(argv: list[str]) -> int:
    """Runs the command; the exit status is 130 if it was stopped early."""
    line = read_run_spec(COMMAND, argv)
    show_logs(line.settings)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    stop = SignalStop(partial(console.print, markup=False))
    show = partial(ProgressView, console)
    made = run_loop(generate(line, line.make_environment(), show, stop))
    rows = f"{counted(made.rows, 'row')} of {counted(made.groups, 'group')}"
    console.print(f"{rows} in {line.settings.filepath}", markup=False)
    return 0 if made.ending == "done" else 130
