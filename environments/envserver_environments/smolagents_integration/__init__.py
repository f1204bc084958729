"""The earlier name of `envserver_environments.gaia`: its commands work as before, with GAIA where
it was downloaded, the split that has answers, the web tools where `TAVILY_API_KEY` is set, and the
tools for files; flags and variables that say otherwise win."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from envserver_environments.gaia.loading import DEFAULT_COPY

from envserver import main as envserver_main

_MAKES_ROLLOUTS = ("process", "serve", "evaluate")
_NAMES_TASKS = ("--env.data_set", "--env.data_path", "--env.dataset_path", "--config")


def main() -> int:
    set_earlier_defaults(sys.argv[1:], os.environ, Path())
    return envserver_main(environment="gaia")


def set_earlier_defaults(
    words: Sequence[str], environ: MutableMapping[str, str], folder: Path
) -> None:
    """Sets the earlier defaults as variables, unless there are others; says so in a line each.
    `words` are the command and its arguments; `folder` may have a copy of GAIA."""
    if not words or words[0] not in _MAKES_ROLLOUTS:
        return
    environ.setdefault("ENVSERVER_ENV__FILES", "true")
    flags = {word.partition("=")[0] for word in words}
    if not flags & {*_NAMES_TASKS} and "ENVSERVER_ENV__DATA_SET" not in environ:
        if (folder / DEFAULT_COPY).is_dir():
            environ["ENVSERVER_ENV__DATA_SET"] = "gaia"
            environ.setdefault("ENVSERVER_ENV__SPLIT", "validation")
            _say(f"the tasks are those of GAIA in {DEFAULT_COPY}, split validation.")
        else:
            _say(
                f"GAIA is not in {DEFAULT_COPY}: the tasks are the 30 of the sample. To fetch it: "
                "python -m envserver_environments.gaia.download"
            )
    if environ.get("TAVILY_API_KEY") and "ENVSERVER_ENV__WEB" not in environ:
        environ["ENVSERVER_ENV__WEB"] = "live"
        environ.setdefault("ENVSERVER_ENV__WEB_DEPTH", "advanced")
        if "--env.web" not in flags:
            _say("TAVILY_API_KEY is set, so agents have web tools (--env.web none: not).")


def _say(text: str) -> None:
    sys.stderr.write(f"smolagents_env: {text}\n")
