"""`envserver replay`: its settings and what it shows; the work: `running.replaying`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from envserver_records.errors import ConfigError, UsageError
from rich.console import Console
from rich.table import Table

from ..running.replaying import Record, Replayed, read_record, replay
from ..running.run_settings import ReplaySettings
from ..running.spec import RunSpec
from ..running.tally import counted
from .command_line import read_command_line
from .logs import configure_logs
from .loop import run_loop
from .rescore_command import with_flag
from .settings import named_environment

SUMMARY = """Runs one recorded rollout again, its calls answered with what they were answered then:
`envserver replay FILE --rollout ID`. It stops at the first difference in what the agent sends, and
says at the end whether result and score are the same (exit status 1: they are not). --debug runs
the agent in this process and stops it in pdb."""

_SHOWN = 70


def run(argv: list[str]) -> int:
    """The command.

    Raises:
        UsageError: there is no such rollout or environment, or it cannot be replayed.
    """
    words = with_flag(argv, "--source")
    record, defaults = None, None
    if not {"-h", "--help"} & set(words):
        record = read_record(_said(words, "--source"), (_said(words, "--rollout") or [""])[-1])
        defaults = _as_then(record)
        if named_environment(words) is None:
            words = ["--env", str(record.facts["env"]), *words]
    line = read_command_line(
        "replay", SUMMARY, words, settings_class=ReplaySettings, defaults=defaults
    )
    if line is None or record is None:
        return 0
    settings = line.settings
    configure_logs("warning" if settings.debug else settings.log_level, settings.log_format)
    environment = _environment(line)
    live = settings.services == "live" or (settings.services == "auto" and not record.kept)
    done = run_loop(
        replay(
            record,
            settings,
            environment,
            line.reference,
            live_services=live,
            debug=settings.debug,
        )
    )
    _show(Console(highlight=False, soft_wrap=True), record, done)
    return 0 if done.same else 1


def _said(words: Sequence[str], flag: str) -> list[str]:
    """The values of `flag`, before the environment is known with which all can be read.

    Raises:
        UsageError: it has none.
    """
    found = [
        words[at + 1] if word == flag else word.partition("=")[2]
        for at, word in enumerate(words)
        if (word == flag and at + 1 < len(words)) or word.startswith(f"{flag}=")
    ]
    if not found:
        raise UsageError(
            f"`envserver replay` needs {flag}.", hint="envserver replay FILE --rollout ID"
        )
    return found


def _as_then(record: Record) -> dict[str, Any]:
    """The settings with which it was run, as far as they are known."""
    config = dict(record.facts.get("env_config") or {})
    config |= {"split": record.facts["split"], "seed": record.facts["seed"]}
    known = {"temperature", "top_p", "max_tokens"}
    sampling = {key: value for key, value in record.sampling.items() if key in known}
    return {"env": config, "sampling": sampling}


def _environment(line: RunSpec[Any]) -> Any:
    """
    Raises:
        ConfigError: it must not run in this process.
    """
    settings: ReplaySettings = line.settings
    if not settings.debug:
        return line.make_environment()
    if line.environment_class.isolation == "sandboxed" and not settings.without_walls:
        raise ConfigError(
            f"Agents of {line.environment_class.name!r} execute the model's code in their own "
            "process: --debug would run it here, without a wall.",
            hint="--without_walls true says that you know what the model wrote.",
        )
    config = settings.env.model_copy(update={"worker_timeout": 7 * 86400.0})
    unhurried = settings.model_copy(update={"env": config})
    return RunSpec(unhurried, line.reference, line.environment_class).make_environment()


def _show(console: Console, record: Record, done: Replayed) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False)

    how = "its calls were kept" if record.kept else "its calls are read off its conversations"
    say(f"{record.rollout.rollout_id} ({record.place}): {how}.")
    if done.difference is not None:
        say(f"DIFFERENT at call {done.difference.call}: {done.difference.what}")
        for text in done.difference.diff:
            say(f"  {text}")
        if record.rollout.limit and not done.left:
            say(
                f"Then it was ended by a limit ({record.rollout.limit}): is that one set as it was?"
            )
        return
    if done.failure:
        say(f"FAILED after {counted(done.played, 'call')}: {done.failure}")
        return
    if done.left:
        say(f"DIFFERENT: it ended {counted(done.left, 'call')} earlier than then.")
    table = Table(box=None, padding=(0, 2, 0, 1))
    for name in ("", "then", "now"):
        table.add_column(name, overflow="fold")
    for fact in done.facts:
        now = "the same" if fact.same else f"differs at {', '.join(fact.places[:3])}: "
        table.add_row(fact.name, _short(fact.then), now + _short(fact.now) * (not fact.same))
    console.print(table)
    if done.same:
        say(f"The same: {counted(done.played, 'call')}, the result and the score.")
    else:
        say(f"DIFFERENT: {', '.join(fact.name for fact in done.facts if not fact.same)}.")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
