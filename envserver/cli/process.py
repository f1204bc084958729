"""`envserver process`: makes rollouts and keeps them in files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shlex import quote

from pydantic import SecretStr
from pydantic_core import to_jsonable_python

from ..running.run_settings import ProcessSettings
from ..settings.config import OpenAIConfig, Settings
from ..settings.section import EnvironmentConfig
from . import lean_imports
from .command_line import FREQUENT, CommandSpec, program

SUMMARY = """Runs rollouts of one or more environments and writes each finished group as a line
of JSON. The first Ctrl-C finishes the open groups and stops; the second stops at once; the third
kills. Written groups are never lost."""

COMMAND = CommandSpec(
    "process",
    SUMMARY,
    ProcessSettings,
    usage="--env NAME[=WEIGHT,NAME=WEIGHT]",
    frequent=(
        *FREQUENT,
        "env.data_path_to_save_groups",
        "resume",
        "overwrite",
        "verbose",
        "ray.address",
        "ray.runners",
    ),
    aliases={
        "ray": "ray.address",
        "limit": "total_groups",
        "out": "env.data_path_to_save_groups",
        "o": "env.data_path_to_save_groups",
    },
    openai_variables="openai",
)

_SECRET = re.compile("token|key|secret|password")


def run(argv: list[str]) -> int:
    with lean_imports():
        from ..running.group_run import process_run
        from .console import Console
        from .conversation import Samples
        from .loop import SignalStop, run_loop, show_logs
        from .mixing import read_mix
        from .progress import ProgressView, show_result

    members = read_mix(COMMAND, argv)
    spec = members[0].spec
    show_logs(spec.settings)
    console = Console(stderr=True)
    run = process_run(
        members,
        give=Samples(console) if spec.settings.verbose else None,
        show=partial(ProgressView, console),
        stop=SignalStop(console.print),
    )
    try:
        run_loop(run.run())
    finally:
        show_result(console, run, spec.settings)
    if run.stopped:
        console.print("Stopped early; run the same command with --resume to continue.")
        return 130
    if run.stop.requested:
        console.print("All groups were made before it stopped.")
    if len(members) == 1 and run.tally.groups:
        console.print("Try next:")
        exact = "missing_token_ids" not in run.tally.flags
        path = next(iter(run.files))
        for command in _suggestions(spec.reference, spec.settings, path, exact=exact):
            console.say(f"  {command}")
    return 0


def _suggestions(reference: str, settings: Settings, path: Path, *, exact: bool) -> Iterator[str]:
    from ..running.engines import SIMULATED

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
    yield f"{envserver} process {environment} --openai.base_url {url}{replaced}   # a real engine"
    yield f"{envserver} serve {environment} --model sim   # for a trainer"


def _as_set(settings: Settings) -> Iterator[str]:
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
