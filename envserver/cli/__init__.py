"""The command line: `envserver COMMAND ...`.

This module imports only the standard library, so that `--help` and `--version` are fast. A command
is a declaration (`CommandSpec`) and a function `run(argv) -> exit status` in the module of its
family; `run` imports what the work needs (`lean_imports`). Errors are printed here in one line,
with status 2 for a user error, 1 otherwise, 130 for Ctrl-C, 143 for SIGTERM. Tracebacks only with
`--debug`.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from .command_line import CommandSpec


@dataclass(frozen=True)
class Command:
    """A command: its module and a one-line summary.

    Args:
        module: dotted name (with a leading dot: of this package) of the module that has `function`
            (`run(argv) -> exit status`) and `spec`, the CommandSpec; "" for a group of commands.
        has_environment: it takes `--env`.
        has_debugger: `--debug` starts a debugger instead of only showing tracebacks.
        words: its subcommands.
        before: the command of envserver that `--help` lists after it; "": it is listed last.
    """

    module: str
    summary: str
    function: str = "run"
    spec: str = "COMMAND"
    has_environment: bool = False
    has_debugger: bool = False
    words: Mapping[str, Command] = field(default_factory=dict)
    before: str = ""

    def load_spec(self) -> CommandSpec[Any] | None:
        """None: the command parses its arguments itself."""
        if not self.spec:
            return None
        module = importlib.import_module(self.module, __name__)
        return cast("CommandSpec[Any]", getattr(module, self.spec))


def _words(module: str, prefix: str = "", **summaries: str) -> dict[str, Command]:
    """Commands with functions `run_WORD` and declarations `WORD`."""
    return {
        word: Command(module, summary, f"run_{prefix}{word}", f"{prefix}{word}".upper())
        for word, summary in summaries.items()
    }


def _run_by(module: str, word: str, summary: str) -> Command:
    """A command of a module that has several, which takes `--env`."""
    return replace(_words(module, **{word: summary})[word], has_environment=True)


_EVALUATE = _words(
    ".evaluate_command",
    compare="compare two evaluations",
    merge="combine the shards of an evaluation",
    report="write an evaluation's report again",
)
_MODELS = _words(
    ".models_command",
    list="list the named models",
    start="start an engine for a model and keep it running",
    tiny="train a tiny language model on a laptop",
    probe="show what an engine supports and what it lacks",
    sim="serve the simulated engine over HTTP",
)
_ENV = _words(
    ".env_command",
    install="install a package of environments",
    list="list installed packages",
    remove="remove an installed package",
    push="share a project on the hub",
)
_AGENTS = _words(
    ".env_command",
    "agents_",
    install="install a coding agent for --agent",
    list="list the known agents",
)
_SANDBOXES = _words(
    ".serve", "sandboxes_", serve="make sandboxes on this machine for remote servers"
)
_TOKEN = _words(
    ".token_command",
    create="make a token for a role; print it",
    list="list tokens: name, role, expiry",
    revoke="revoke a token by name or id",
)

COMMANDS = {
    **_words(".env_command", sample="write sample files of an environment's inputs"),
    "process": Command(
        ".process", "run and score rollouts, write them to a JSONL file", has_environment=True
    ),
    "evaluate": Command(
        ".evaluate_command",
        "measure a model: pass@k, pass^k, next to baselines",
        has_environment=True,
        words=_EVALUATE,
    ),
    "serve": Command(
        ".serve",
        "run an environment and serve its groups to trainers over HTTP",
        has_environment=True,
    ),
    **_words(".view_command", top="show what a running server is doing"),
    "view": Command(
        ".view_command", "show groups and rollouts in the browser: files, stores, servers"
    ),
    "run-api": Command(".serve", "serve trainers and remote environments", "run_api", "RUN_API"),
    "join": _run_by(".serve", "join", "run an environment here for a remote server"),
    "run": Command(
        ".run_command",
        "run an environment's agent once, or debug it",
        has_environment=True,
        has_debugger=True,
    ),
    **_words(".score_command", verify="check delivered tokens against the engine"),
    "score": _run_by(".score_command", "score", "score given answers, without a model"),
    "rescore": _run_by(
        ".score_command", "rescore", "score stored rollouts again, or by another rubric"
    ),
    "replay": replace(
        _run_by(".run_command", "replay", "run one recorded rollout again"), has_debugger=True
    ),
    "check": Command(
        ".check_command",
        "check that an environment's rewards cannot be cheated",
        has_environment=True,
    ),
    "models": Command("", "start a model, make a tiny one, probe an engine", words=_MODELS),
    "env": Command("", "install and share packages of environments", words=_ENV),
    "agents": Command("", "install external agents", words=_AGENTS),
    "sandboxes": Command("", "make sandboxes for remote servers", words=_SANDBOXES),
    "token": Command("", "create, list and revoke access tokens", words=_TOKEN),
    "doctor": Command(".doctor_command", "show what this machine can do, sandboxes first"),
    "list": Command(".env_command", "list the installed environments", "run_environments", ""),
    "completion": Command(
        ".completion", "print the completion script of bash, zsh or fish", spec=""
    ),
}


def all_commands() -> dict[str, Command]:
    """Returns the commands of envserver and of installed packages, as `--help` lists them.
    A package adds a dict of names and `Command`s by an entry point of the group
    `envserver.commands`.
    Reading entry points takes a tenth of a second: only help, completion and other names need it.
    """
    from importlib.metadata import entry_points

    found: Mapping[str, Command] = COMMANDS
    for point in sorted(entry_points(group="envserver.commands"), key=lambda point: point.name):
        try:
            added: Mapping[str, Command] = point.load()
        except Exception as error:  # noqa: BLE001 - a broken package must not break other commands
            _complain(f"The commands of {point.value} cannot be loaded: {error}")
            continue
        found = {**found, **added, **found}
    places = {name: place for place, name in enumerate(" ".join(_GROUPS.values()).split())}

    def place_of(name: str) -> float:
        return places.get(name, places.get(found[name].before, len(places)) - 0.5)

    return {name: found[name] for name in sorted(found, key=place_of)}


_GROUPS = {
    "Most used": "init list check process run view evaluate serve export doctor",
    "Write environments": "sample score env",
    "Run": "replay scenarios lm-eval models agents",
    "Look": "top verify",
    "Train": "run-api join",
    "Data and models": "rescore sft-gen convert validate sft merge sweep publish",
    "Operate": "token sandboxes completion",
}
"""The commands by what a person wants to do, as `--help` shows them."""


def find_command(name: str) -> Command | None:
    return COMMANDS.get(name) or all_commands().get(name)


def main(argv: Sequence[str] | None = None, *, environment: str | None = None) -> int:
    """Runs one command; returns the exit status. `argv`: unset: that of this process.
    `environment`: what `--env` would name (`python -m environments.math ...`)."""
    _open_closed_streams()
    try:
        status = _main(argv, environment)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has closed the pipe (`| head`): nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _main(argv: Sequence[str] | None, environment: str | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(environment))
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from ..version import __version__

        print(f"envserver {__version__}")
        return 0
    name, rest = words[0], words[1:]
    command = find_command(name)
    if command is None or (environment is not None and not command.has_environment):
        _complain(f"There is no command {name!r}.", _hint(name, _listed(environment)))
        return 2
    if rest and rest[0] in command.words:
        return _run(*subcommand(command, rest), debug, environment)
    if not command.module:
        return _group(name, command, rest)
    if environment is not None:
        rest = ["--env", environment, *rest]
    if debug and command.has_debugger:
        rest.append("--debug")
    return _run(command, rest, debug, environment)


def subcommand(command: Command, rest: list[str]) -> tuple[Command, list[str]]:
    while rest and rest[0] in command.words:
        command, rest = command.words[rest[0]], rest[1:]
    return command, rest


def _group(name: str, group: Command, rest: Sequence[str]) -> int:
    if rest and rest[0] in ("-h", "--help", "help"):
        print(_help_of_group(name, group))
        return 0
    if rest:
        _complain(f"There is no command `{name} {rest[0]}`.", _hint(rest[0], group.words))
    else:
        known = ", ".join(f"`envserver {name} {word}`" for word in group.words)
        _complain(f"`envserver {name}` needs a command: {known}.")
    return 2


def _run(command: Command, argv: list[str], debug: bool, environment: str | None) -> int:
    try:
        if ("-h" in argv or "--help" in argv) and (spec := command.load_spec()) is not None:
            alone = environment is None
            spec.show_help(argv, program=_program(environment), with_environment=alone)
            return 0
        with lean_imports():
            module = importlib.import_module(command.module, __name__)
        if command.has_environment:
            from ..workers.linux import kill_programs_at_end

            kill_programs_at_end()
        return int(getattr(module, command.function)(argv))
    except KeyboardInterrupt as stop:
        return int(getattr(stop, "status", 130))
    except BrokenPipeError:
        raise
    except (Exception, SystemExit) as error:
        if debug and not (command.has_debugger and _is_callers(error)):
            raise
        return _explain(error)


@contextmanager
def lean_imports() -> Iterator[None]:
    """Imports in the block leave out work that a start does not need; Ctrl-C waits for its end.
    What is left out is made when it is used. Libraries in C and Rust do not expect Ctrl-C while
    they are imported."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # The collector would spend a sixth of a start on what imports make, which stays.
    collects = gc.isenabled()
    gc.disable()
    try:
        from pydantic import BaseModel

        if "rich" not in sys.modules:
            # structlog would import it for a form of tracebacks that is not used: 50 modules.
            sys.modules["rich"] = None  # type: ignore[assignment]  # fails, as documented
            importlib.import_module("structlog")
            del sys.modules["rich"]
        # FastAPI would build the models of OpenAPI documents: a third of its import.
        BaseModel.model_config["defer_build"] = True
        try:
            yield
        finally:
            del BaseModel.model_config["defer_build"]
    finally:
        if collects:
            gc.enable()
        gc.freeze()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_callers(error: BaseException) -> bool:
    from envserver_records.errors import UsageError

    return isinstance(error, UsageError)


def _explain(error: BaseException) -> int:
    from envserver_records.errors import EnvserverError, UsageError

    if isinstance(error, EnvserverError):
        _complain(error.message, error.hint)
        return 2 if isinstance(error, UsageError) else 1
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # pathlib's, for ~
        _complain("This user has no home directory.", "Set HOME, or give paths without ~.")
        return 2
    if isinstance(error, SystemExit):
        from ..tools.calling import place_of

        _complain(f"The environment raised SystemExit({error}) {place_of(error)}")
        return 1
    _complain(f"Internal error: {type(error).__name__}: {error}", "--debug shows the traceback.")
    return 1


def _open_closed_streams() -> None:
    """Opens /dev/null for stdin, stdout and stderr if they are closed (`>&-`): otherwise the next
    opened file would take their descriptor and receive printed output."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode))


def _program(environment: str | None) -> str:
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec is not None else ""
    if environment is None:
        return "python -m envserver" if module == "envserver" else "envserver"
    if "environments" in module:
        return f"python -m {module}"
    return f"python -m envserver_environments.{environment}"


def _listed(environment: str | None) -> dict[str, Command]:
    return {n: c for n, c in all_commands().items() if environment is None or c.has_environment}


def _help(environment: str | None) -> str:
    program = _program(environment)
    commands = _listed(environment)
    width = max(map(len, commands))
    group_of = {name: title for title, names in _GROUPS.items() for name in names.split()}
    groups: dict[str, list[str]] = {}
    for name, command in commands.items():
        title = group_of.get(name) or group_of.get(command.before, "Of other packages")
        groups.setdefault(title, []).append(f"  {name:<{width}}  {command.summary}")
    example = "--env.total_steps 8 --model sim"
    if environment is None:
        example = f"--env math {example}"
    return "\n".join(
        [
            "Runs environments that train language-model agents.",
            "",
            f"Usage: {program} COMMAND [--name value ...] [--config run.yaml] [--debug]",
            *(line for title, lines in groups.items() for line in ("", f"{title}:", *lines)),
            "",
            f"For example: {program} process {example}",
            f"Settings of a command: {program} COMMAND --help",
        ]
    )


def _help_of_group(name: str, group: Command) -> str:
    words = {word: command.summary for word, command in group.words.items()}
    for word, command in group.words.items():
        words |= {f"{word} {name}": below.summary for name, below in command.words.items()}
    return "\n".join(
        [
            f"Usage: {_program(None)} {name} COMMAND [--name value ...]",
            "",
            *_lines(words),
            "",
            f"Settings of a command: {_program(None)} {name} COMMAND --help",
        ]
    )


def _lines(summaries: Mapping[str, str]) -> list[str]:
    width = max(map(len, summaries))
    return [f"  {name:<{width}}  {summary}" for name, summary in summaries.items()]


def _hint(name: str, commands: Mapping[str, Command]) -> str:
    import difflib

    near = difflib.get_close_matches(name, commands, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(commands)}."


def _complain(message: str, hint: str = "") -> None:
    from ..telemetry.redaction import printable

    message, hint = printable(message, keep="\n\t"), printable(hint, keep="\n\t")
    coloured = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    red, plain = ("\033[31m", "\033[0m") if coloured else ("", "")
    print(f"{red}envserver: {message}{plain}{f' {hint}' if hint else ''}", file=sys.stderr)
