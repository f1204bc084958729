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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from .command_line import CommandSpec


@dataclass(frozen=True)
class Command:
    """A command: its module and a one-line summary.

    Args:
        module: the module that has `function` (`run(argv) -> exit status`; an EnvserverError is
            explained in one line, with status 2 if the caller is at fault) and `spec`, the
            CommandSpec; "" for a group of commands.
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
        module = importlib.import_module(f".{self.module}", __name__)
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
    "compare": _other("evaluate_command", "compare two evaluations", "run_compare", "COMPARE"),
    "merge": _other(
        "evaluate_command", "combine the shards of an evaluation", "run_merge", "MERGE"
    ),
    "report": _other(
        "evaluate_command", "write the report of an evaluation again", "run_report", "REPORT"
    ),
}
_SFT = {
    "build": _other(
        "sft_command", "make rows for each tool from unified trajectories", "run_build", "BUILD"
    ),
    "preview": _other("sft_command", "show what `sft build` would write", "run_preview", "PREVIEW"),
    "router": _other(
        "sft_command",
        "prepare queries and plans",
        "run_router",
        "ROUTER",
        generate=_generate("router", "let a teacher write plans for queries"),
    ),
    "math": _other(
        "sft_command",
        "prepare problems with solutions",
        "run_math",
        "MATH",
        generate=_generate("math", "keep a teacher's right solutions of k tries"),
    ),
    "code": _other(
        "sft_command",
        "prepare programs",
        "run_code",
        "CODE",
        generate=_generate("code", "keep a teacher's programs that pass their tests"),
    ),
}
_MODELS = {
    "list": _other("models_command", "list the models that have names", "run_list", "LIST"),
    "start": _other(
        "models_command", "start an engine for a model and keep it running", "run_start", "START"
    ),
    "tiny": _other("models_command", "train a tiny language model on a laptop", "run_tiny", "TINY"),
    "probe": _other(
        "models_command", "show what an engine supports and what it lacks", "run_probe", "PROBE"
    ),
    "sim": _other("models_command", "serve the simulated engine over HTTP", "run_simulated", "SIM"),
}
_ENV = {
    "install": _other("env_command", "install a package of environments", "run_install", "INSTALL"),
    "list": _other("env_command", "list what is installed", "run_list", "LIST"),
    "remove": _other("env_command", "remove an installed package", "run_remove", "REMOVE"),
    "push": _other("env_command", "share a project on the hub", "run_push", "PUSH"),
}
_AGENTS = {
    "install": _other(
        "env_command",
        "install a coding agent for --agent",
        "run_agents_install",
        "AGENTS_INSTALL",
    ),
    "list": _other(
        "env_command", "list the agents that are known", "run_agents_list", "AGENTS_LIST"
    ),
}
_SANDBOXES = {
    "serve": _other(
        "serve", "make sandboxes on this machine for remote servers", "run_sandboxes", "SANDBOXES"
    ),
}
_TOKEN = {
    "create": _other("token_command", "make a token for a role; print it", "run_create", "CREATE"),
    "list": _other("token_command", "list tokens: name, role, expiry", "run_list", "LIST"),
    "revoke": _other("token_command", "revoke a token by name or id", "run_revoke", "REVOKE"),
}

COMMANDS = {
    "init": _other("env_command", "make the package of a new environment", "run_init", "INIT"),
    "sample": _other(
        "env_command", "write sample files of an environment's inputs", "run_sample", "SAMPLE"
    ),
    "process": Command("process", "make scored rollouts and write them to a JSONL file"),
    "evaluate": Command(
        "evaluate_command", "measure a model: pass@k, pass^k, next to baselines", words=_EVALUATE
    ),
    "lm-eval": _other(
        "evaluate_command",
        "run tasks of lm-evaluation-harness on a model",
        "run_lm_eval",
        "LM_EVAL",
    ),
    "serve": Command("serve", "run an environment and serve its groups to trainers over HTTP"),
    "sft-gen": Command(
        "process",
        "write the best rollouts as rows for supervised training",
        function="run_sft_gen",
        spec="SFT_GEN",
    ),
    "top": _other("view_command", "show what a running server does", "run_top", "TOP"),
    "view": _other(
        "view_command", "show groups and rollouts in the browser: files, stores, servers"
    ),
    "run-api": _other("serve", "serve trainers and remote environments", "run_api", "RUN_API"),
    "join": Command(
        "serve", "run an environment here for a remote server", function="run_join", spec="JOIN"
    ),
    "run": Command(
        "run_command", "run an environment's agent once, or debug it", has_debugger=True
    ),
    "export": _other("export_command", "filter stored rollouts and write them in another format"),
    "verify": _other(
        "score_command", "check delivered tokens against the engine", "run_verify", "VERIFY"
    ),
    "score": Command(
        "score_command",
        "score given answers, without a model",
        function="run_score",
        spec="SCORE",
    ),
    "rescore": Command(
        "score_command",
        "score stored rollouts again, or by another rubric",
        function="run_rescore",
        spec="RESCORE",
    ),
    "replay": Command(
        "run_command",
        "run one recorded rollout again",
        has_debugger=True,
        function="run_replay",
        spec="REPLAY",
    ),
    "scenarios": _other(
        "process", "run models in a scenario, keep traces", "run_scenarios", "SCENARIOS"
    ),
    "convert": _other(
        "export_command",
        "make unified trajectories from other formats",
        "run_convert",
        "CONVERT",
    ),
    "validate": _other(
        "export_command", "check files of unified trajectories", "run_validate", "VALIDATE"
    ),
    "sft": Command("", "build data for supervised fine-tuning", False, words=_SFT),
    "merge": _other("merge_command", "merge models: base + alpha * (rl - sft)"),
    "sweep": Command(
        "merge_command",
        "merge with several alphas, evaluate each, draw the reward",
        function="run_sweep",
        spec="SWEEP",
    ),
    "publish": _other(
        "merge_command", "publish a model or an adapter on the hub", "run_publish", "PUBLISH"
    ),
    "check": Command("check_command", "check that an environment's rewards cannot be cheated"),
    "models": Command("", "start a model, make a tiny one, probe an engine", False, words=_MODELS),
    "env": Command("", "install and share packages of environments", False, words=_ENV),
    "agents": Command("", "install external agents", False, words=_AGENTS),
    "sandboxes": Command("", "make sandboxes for remote servers", False, words=_SANDBOXES),
    "token": Command("", "create, list and revoke access tokens", False, words=_TOKEN),
    "doctor": _other("doctor_command", "show what this machine can do, sandboxes first"),
    "list": _other("env_command", "list the installed environments", "run_environments", ""),
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
        with lean_imports():
            module = importlib.import_module(f".{command.module}", __name__)
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

    Everything works as after a plain import: what is left out is made when it is used. Libraries in
    C and Rust do not expect Ctrl-C while they are imported.
    """
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
