"""`envserver process`: rollouts of one environment into a JSONL file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from textwrap import shorten

from pydantic import SecretStr
from pydantic_core import to_jsonable_python
from rich.table import Table

from ..config import OpenAIConfig, Settings
from ..environment_config import EnvironmentConfig
from ..running.engines import SIMULATED
from ..running.group_run import GroupRun
from ..running.judging import judge_line
from ..running.mix import Member, alone
from ..running.processing import process_run
from ..running.run_settings import ProcessSettings
from ..running.tally import Tally, counted, mean_text
from ..tokens.flags import FLAGS, Actions, chosen
from .command_line import program, read_run_spec
from .console import Console
from .logs import show_logs
from .loop import run_loop
from .mixing import read_mix
from .progress import ProgressView, summary_table
from .samples import Samples
from .signals import SignalStop
from .specs.process import COMMAND

_DONE = {"train": "trained", "mask": "affected calls masked", "drop": "not usable for RL"}
_SECRET = re.compile("token|key|secret|password")
LONGEST_WORDS = 200
"""Maximum length of a failure message on the terminal; the failures file has the full text."""


def run(argv: list[str]) -> int:
    members = read_mix(COMMAND, argv)
    if members is None:
        line = read_run_spec(COMMAND, argv)
        members = [alone(line)]
    settings = members[0].spec.settings
    show_logs(settings)
    return run_loop(process(members, Console(stderr=True)))


async def process(members: Sequence[Member[ProcessSettings]], console: Console) -> int:
    """Makes the groups and shows them; returns the exit status: 0, or 130 when it was stopped."""
    run = process_run(
        members,
        give=Samples(console) if members[0].spec.settings.verbose else None,
        show=partial(ProgressView, console),
        stop=SignalStop(console.print),
    )
    try:
        await run.run()
    finally:
        show_result(console, run, members[0].spec.settings)
    if run.stopped:
        console.print("Stopped early; run the same command with --resume to continue.")
    elif len(members) == 1 and run.tally.groups:
        spec, path = members[0].spec, next(iter(run.files))
        exact = "missing_token_ids" not in run.tally.flags
        show_suggestions(console, spec.reference, spec.settings, path, exact=exact)
    return 130 if run.stopped else 0


def show_result(console: Console, run: GroupRun, settings: Settings) -> None:
    """Shows the results and where the files are."""
    if run.tally.first_groups:
        console.print(summary_table(run.tally))
        if len(run.shares) > 1:
            console.print(_shares_table(run))
    tokens = settings.tokens
    actions = chosen(tokens.train, tokens.mask, tokens.drop)
    show_notes(console, run.tally, list(run.written().items()), settings, actions)
    if run.judge is not None:
        console.say(judge_line(run.judge))
    for file in run.files.values():
        if file.failures.lines:
            path = file.failures.path
            console.say(f"Failures: {path}")


def _shares_table(run: GroupRun) -> Table:
    """Builds a table of groups and rewards of each environment of a mix."""
    table = Table()
    for name in ("environment", "groups", "share", "wanted", "mean"):
        table.add_column(name, justify="left" if name == "environment" else "right")
    for name, wanted in run.shares.items():
        share = run.groups[name] / max(1, run.groups.total())
        mean = mean_text(run.rewards[name].mean)
        table.add_row(name, str(run.groups[name]), f"{share:.0%}", f"{wanted:.0%}", mean)
    return table


def show_notes(
    console: Console,
    tally: Tally,
    files: list[tuple[Path, int]],
    settings: Settings,
    actions: Actions,
) -> None:
    """Shows notes about a run, for every command.

    Args:
        files: paths of the group files, and the number of groups in each.
    """
    if settings.model == SIMULATED:
        console.print("The model was simulated: these rewards do not measure a real model.")

    if tally.rollouts:
        console.say(tally.costs_line())
    for path, groups in files:
        console.say(f"{counted(groups, 'group')} in {path}")
    for counts, noun in ((tally.drops, "dropped group"), (tally.failures, "failed attempt")):
        for kind, count in sorted(counts.items()):
            words = shorten(tally.last_words.get(kind, ""), LONGEST_WORDS, placeholder=" ...")
            console.say(f"{counted(count, noun)}: {kind}{words and f' ({words})'}")
    for flag, count in sorted(tally.flags.items()):
        meaning = f" ({FLAGS[flag].meaning})" if flag in FLAGS else ""
        console.say(
            f"{counted(count, 'rollout')} flagged, {_DONE[actions.of(flag)]}: {flag}{meaning}"
        )
    if tally.untrained.tokens:
        flags = ", ".join(f"{flag} {count:,}" for flag, count in tally.untrained.by_flag.items())
        console.say(f"{tally.untrained.share:.0%} of the sampled tokens are not trained: {flags}")


def show_suggestions(
    console: Console, reference: str, settings: Settings, path: Path, *, exact: bool
) -> None:
    """Prints commands to try next."""
    console.print("Try next:")
    for command in suggestions(reference, settings, path, exact=exact):
        console.say(f"  {command}")


def suggestions(reference: str, settings: Settings, path: Path, *, exact: bool) -> Iterator[str]:
    """Yields commands to try next, as they can be typed.

    Args:
        exact: the engine returned token ids.
    """
    envserver = program()
    yield f"{envserver} view {quote(os.fspath(path))}   # in a browser"
    environment = " ".join([f"--env {quote(reference)}", *_as_set(settings)])
    if settings.model != SIMULATED:
        if exact:
            urls = quote(",".join(settings.openai.base_urls))
            engine = f"--model {quote(settings.model)}" if settings.model else ""
            engine = engine or f"--openai.base_url {urls}"
            yield f"{envserver} verify {quote(os.fspath(path))} {engine}"
            yield f"{envserver} serve {environment} {engine}   # for a trainer"
        return
    replaced = "" if settings.env.data_path_to_save_groups else " --overwrite"
    url = OpenAIConfig().base_urls[0]
    yield (f"{envserver} process {environment} --openai.base_url {url}{replaced}   # a real engine")
    yield f"{envserver} serve {environment} --model sim   # for a trainer"


def _as_set(settings: Settings) -> Iterator[str]:
    """Yields the flags of what was set of the environment's own settings and of the agent.

    Secrets are left out.
    """
    for section, model in (("env", settings.env), ("agent", settings.agent)):
        own = model.model_fields_set - EnvironmentConfig.model_fields.keys()
        for name in type(model).model_fields:
            value = getattr(model, name)
            # An environment in another interpreter has its secrets as text.
            if name not in own or isinstance(value, SecretStr) or _SECRET.search(name):
                continue
            plain = to_jsonable_python(value)
            text = plain if isinstance(plain, str) else json.dumps(plain)
            yield f"--{section}.{name} {quote(text)}"
