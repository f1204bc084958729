"""`envserver replay`: prints the result of a replay; the work is in `running.replaying`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from envserver_records.errors import UsageError
from rich.table import Table

from ..registry import find
from ..running.debugging import debuggable
from ..running.replaying import (
    Record,
    Replayed,
    read_record,
    recorded_environment,
    recorded_settings,
    replay,
)
from ..running.tally import counted
from .command_line import read_run_spec
from .console import Console
from .logs import configure_logs
from .loop import run_loop
from .sources import Given, as_list
from .specs.replay_command import COMMAND

_SHOWN = 70


def run(argv: list[str]) -> int:
    record = _named_record(COMMAND.flags(argv))
    environment = COMMAND.named_environment(argv) or recorded_environment(record)
    recorded = recorded_settings(record, find(environment).Config)
    line = read_run_spec(COMMAND, argv, defaults=recorded, environment=environment)
    settings = line.settings
    configure_logs("warning" if settings.debug else settings.log_level, settings.log_format)
    played = (debuggable(line) if settings.debug else line).make_environment()
    live = settings.services == "live" or (settings.services == "auto" and not record.kept)
    done = run_loop(
        replay(
            record,
            settings,
            played,
            line.reference,
            live_services=live,
            debug=settings.debug,
        )
    )
    _show(Console(highlight=False, soft_wrap=True), record, done)
    return 0 if done.same else 1


def _named_record(flags: Sequence[Given]) -> Record:
    """Reads the rollout before the environment and its settings are known."""
    sources = [str(item) for one in flags if one.path == "source" for item in as_list(one.value)]
    if not sources:
        raise UsageError(
            "`envserver replay` needs a file of rollouts.",
            hint="envserver replay FILE --rollout ID",
        )
    ids = [str(one.value) for one in flags if one.path == "rollout" and one.value]
    return read_record(sources, ids[-1] if ids else "")


def _show(console: Console, record: Record, done: Replayed) -> None:
    how = "calls recorded" if record.kept else "calls reconstructed from its conversations"
    console.say(f"{record.rollout.rollout_id} ({record.place}): {how}.")
    if done.difference is not None:
        console.say(f"DIFFERENT at call {done.difference.call}: {done.difference.what}")
        for text in done.difference.diff:
            console.say(f"  {text}")
        if record.rollout.limit and not done.left:
            console.say(
                f"The recording hit a limit ({record.rollout.limit}): is the limit the same now?"
            )
        return
    if done.failure:
        console.say(f"FAILED after {counted(done.played, 'call')}: {done.failure}")
        return
    if done.left:
        console.say(f"DIFFERENT: it ended {counted(done.left, 'call')} earlier than recorded.")
    table = Table(box=None, padding=(0, 2, 0, 1))
    for name in ("", "then", "now"):
        table.add_column(name, overflow="fold")
    for fact in done.facts:
        now = "the same" if fact.same else f"differs at {', '.join(fact.places[:3])}: "
        table.add_row(fact.name, _short(fact.then), now + _short(fact.now) * (not fact.same))
    console.print(table)
    if done.same:
        console.say(f"The same: {counted(done.played, 'call')}, the result and the score.")
    else:
        console.say(f"DIFFERENT: {', '.join(fact.name for fact in done.facts if not fact.same)}.")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
