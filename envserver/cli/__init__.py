"""The command line: `envserver COMMAND ...`.

Each command is a small module that is imported when the command runs. This module imports only the
standard library, so that `--help` and `--version` are fast. A command is a function `run(argv) ->
exit status`; errors are printed here in one line, with status 2 for a user error, 1 otherwise, 130
for Ctrl-C, 143 for SIGTERM. Tracebacks only with `--debug`.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from .command_line import CommandSpec


@dataclass(frozen=True)
class Command:
    """A command: its module and a one-line summary.

    Args:
        module: the module that has `function` (`run(argv) -> exit status`; an EnvserverError is
            explained in one line, with status 2 if the caller is at fault); the module of the same
            name in `specs` has `spec`, the CommandSpec; "" for a group of commands.
        has_environment: it takes `--env`.
        has_debugger: `--debug` starts a debugger instead of only showing tracebacks.
        words: its subcommands.
    """

    module: str
    summary: str
    has_environment: bool = True
    has_debugger: bool = False
    function: str = "run"
    spec: str = "COMMAND"
    words: Mapping[str, Command] = field(default_factory=dict)

    def load_spec(self) -> CommandSpec[Any] | None:
        """Returns what the command declares; None if it parses its arguments itself."""
        if not self.spec:
            return None
        module = importlib.import_module(f".specs.{self.module}", __name__)
        return cast("CommandSpec[Any]", getattr(module, self.spec))


def _other(
    module: str, summary: str, function: str = "run", spec: str = "COMMAND", **words: Command
) -> Command:
    """Creates a command that takes no environment; `words` are its subcommands."""
    return Command(module, summary, False, function=function, spec=spec, words=words)


def _generate(name: str, summary: str) -> Command:
    """Creates `sft NAME generate`."""
    return _other("sft_generate_command", summary, f"run_{name}", name.upper())


_EVALUATE = {
    "compare": _other("evaluate_compare", "compare two evaluations"),
    "merge": _other("evaluate_merge", "make one evaluation of several shards"),
    "report": _other("evaluate_report", "write the report of an evaluation again"),
}
_SFT = {
    "build": _other("sft_build_command", "make rows for each tool from unified trajectories"),
    "preview": _other("sft_preview_command", "show what `sft build` would write"),
    "router": _other(
        "sft_prepare_command",
        "prepare queries and plans",
        "run_router",
        "ROUTER",
        generate=_generate("router", "let a teacher write plans for queries"),
    ),
    "math": _other(
        "sft_prepare_command",
        "prepare problems with solutions",
        "run_math",
        "MATH",
        generate=_generate("math", "keep a teacher's right solutions of k tries"),
    ),
    "code": _other(
        "sft_prepare_command",
        "prepare programs",
        "run_code",
        "CODE",
        generate=_generate("code", "keep a teacher's programs that pass their tests"),
    ),
}
_MODELS = {
    "list": _other("models_list", "list the models that have names"),
    "start": _other("models_start", "start an engine for a model and keep it running"),
    "tiny": _other("models_tiny", "train a tiny language model on a laptop"),
    "probe": _other("models_probe", "show what an engine supports and what it lacks"),
    "sim": _other("models_sim", "serve the simulated engine over HTTP"),
}
_ENV = {
    "install": _other("env_command", "install a package of environments", "run_install", "INSTALL"),
    "list": _other("env_command", "list what is installed", "run_list", "LIST"),
    "remove": _other("env_command", "remove an installed package", "run_remove", "REMOVE"),
    "push": _other("env_command", "share a project on the hub", "run_push", "PUSH"),
}
_AGENTS = {
    "install": _other(
        "agents_command", "install a coding agent for --agent", "run_install", "INSTALL"
    ),
    "list": _other("agents_command", "list the agents that are known", "run_list", "LIST"),
}
_SANDBOXES = {
    "serve": _other("sandboxes_serve", "make sandboxes on this machine for servers elsewhere"),
}
_TOKEN = {
    "create": _other("token_command", "make a token for a role; print it", "run_create", "CREATE"),
    "list": _other("token_command", "list tokens: name, role, expiry", "run_list", "LIST"),
    "revoke": _other("token_command", "revoke a token by name or id", "run_revoke", "REVOKE"),
}

COMMANDS = {
    "init": _other("init_command", "make the package of a new environment"),
    "sample": _other("sample_command", "write sample files of an environment's inputs"),
    "process": Command("process", "make scored rollouts and write them to a JSONL file"),
    "evaluate": Command(
        "evaluate_command", "measure a model: pass@k, pass^k, next to baselines", words=_EVALUATE
    ),
    "lm-eval": _other("lm_eval_command", "run tasks of lm-evaluation-harness on a model"),
    "serve": Command("serve", "run an environment and serve its groups to trainers over HTTP"),
    "sft-gen": Command("sft_command", "write the best rollouts as rows for supervised training"),
    "top": _other("top_command", "show what a running server does"),
    "view": _other(
        "view_command", "show groups and rollouts in the browser: files, stores, servers"
    ),
    "run-api": _other("run_api", "serve trainers and environments that run elsewhere"),
    "join": Command("join", "run an environment here for a server elsewhere"),
    "run": Command(
        "run_command", "run an environment's agent once, or debug it", has_debugger=True
    ),
    "export": _other("export_command", "filter stored rollouts and write them in another format"),
    "verify": _other("verify_command", "check delivered tokens against the engine"),
    "score": Command("score_command", "score given answers, without a model"),
    "rescore": Command("rescore_command", "score stored rollouts again, or by another rubric"),
    "replay": Command("replay_command", "run one recorded rollout again", has_debugger=True),
    "scenarios": _other("scenarios_command", "run models in a scenario, keep traces"),
    "convert": _other("convert_command", "make unified trajectories from other formats"),
    "validate": _other("validate_command", "check files of unified trajectories"),
    "sft": Command("", "build data for supervised fine-tuning", False, words=_SFT),
    "merge": _other("merge_command", "merge models: base + alpha * (rl - sft)"),
    "sweep": Command("sweep_command", "merge with several alphas, evaluate each, draw the reward"),
    "publish": _other("publish_command", "publish a model or an adapter on the hub"),
    "check": Command("check_command", "check that an environment's rewards cannot be cheated"),
    "models": Command("", "start a model, make a tiny one, probe an engine", False, words=_MODELS),
    "env": Command("", "install and share packages of environments", False, words=_ENV),
    "agents": Command("", "install agents of others", False, words=_AGENTS),
    "sandboxes": Command("", "make sandboxes for servers elsewhere", False, words=_SANDBOXES),
    "token": Command("", "create, list and revoke access tokens", False, words=_TOKEN),
    "doctor": _other("doctor_command", "show what this machine can do, sandboxes first"),
    "list": _other("list_command", "list the installed environments", spec=""),
    "completion": _other("completion", "print the completion script of bash, zsh or fish", spec=""),
}


def main(argv: Sequence[str] | None = None, *, environment: str | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program name; unset: those of this process.
        environment: the environment that `--env` would name (`python -m environments.math ...`).

    Returns:
        The exit status.
    """
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
    commands = {n: c for n, c in COMMANDS.items() if environment is None or c.has_environment}
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(commands, environment))
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from .. import __version__

        print(f"envserver {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in commands:
        _complain(f"There is no command {name!r}.", _hint(name, commands))
        return 2
    command = commands[name]
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
    """Returns the subcommand that the first words of `rest` name, and what is behind them."""
    while rest and rest[0] in command.words:
        command, rest = command.words[rest[0]], rest[1:]
    return command, rest


def _group(name: str, group: Command, rest: Sequence[str]) -> int:
    """Shows the help of a group of commands; returns 2 if the subcommand is missing or unknown."""
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
        module = _imported(f"{__name__}.{command.module}")
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


def _imported(name: str) -> ModuleType:
    """Imports a command's module; Ctrl-C waits for it, since libraries in C and Rust do not expect
    it while they are imported."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        from .lean_imports import import_command

        return import_command(name)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_callers(error: BaseException) -> bool:
    """Returns whether the caller made a mistake, of which a traceback says nothing."""
    from envserver_records.errors import UsageError

    return isinstance(error, UsageError)


def _explain(error: BaseException) -> int:
    """Shows an error in one line; returns the exit status."""
    from envserver_records.errors import EnvserverError, UsageError

    if isinstance(error, EnvserverError):
        _complain(error.message, error.hint)
        return 2 if isinstance(error, UsageError) else 1
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # pathlib's, for ~
        _complain("This user has no home directory.", "Set HOME, or give paths without ~.")
        return 2
    if isinstance(error, SystemExit):
        from ..tools.bugs import place_of

        _complain(f"The environment raised SystemExit({error}) {place_of(error)}")
        return 1
    _complain(f"Internal error: {type(error).__name__}: {error}", "--debug shows the traceback.")
    return 1


def _open_closed_streams() -> None:
    """Opens /dev/null for stdin, stdout and stderr if they are closed (`>&-`).

    Otherwise the next opened file would take their descriptor and receive printed output.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode))


def _program(environment: str | None) -> str:
    """Returns the program name as typed: a script, or `python -m MODULE`."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec is not None else ""
    if environment is None:
        return "python -m envserver" if module == "envserver" else "envserver"
    if "environments" in module:
        return f"python -m {module}"
    return f"python -m envserver_environments.{environment}"


def _help(commands: dict[str, Command], environment: str | None) -> str:
    program = _program(environment)
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in commands.items()]
    example = "--env.total_steps 8 --model sim"
    if environment is None:
        example = f"--env math {example}"
    return "\n".join(
        [
            "Runs environments that train language-model agents.",
            "",
            f"Usage: {program} COMMAND [--name value ...] [--config run.yaml] [--debug]",
            "",
            "Commands:",
            *lines,
            "",
            f"For example: {program} process {example}",
            f"Settings of a command: {program} COMMAND --help",
        ]
    )


def _help_of_group(name: str, group: Command) -> str:
    words = {word: command.summary for word, command in group.words.items()}
    for word, command in group.words.items():
        words |= {f"{word} {one}": below.summary for one, below in command.words.items()}
    width = max(map(len, words))
    return "\n".join(
        [
            f"Usage: {_program(None)} {name} COMMAND [--name value ...]",
            "",
            *(f"  {word:<{width}}  {summary}" for word, summary in words.items()),
            "",
            f"Settings of a command: {_program(None)} {name} COMMAND --help",
        ]
    )


def _hint(name: str, commands: Mapping[str, Command]) -> str:
    import difflib

    near = difflib.get_close_matches(name, commands, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(commands)}."


def _complain(message: str, hint: str = "") -> None:
    from ..telemetry.redaction import printable

    message, hint = printable(message, keep="\n\t"), printable(hint, keep="\n\t")
    red, plain = ("\033[31m", "\033[0m") if _colors() else ("", "")
    print(f"{red}envserver: {message}{plain}{f' {hint}' if hint else ''}", file=sys.stderr)


def _colors() -> bool:
    return sys.stderr.isatty() and "NO_COLOR" not in os.environ
