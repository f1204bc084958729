"""The command line: `envserver COMMAND ...`.

One small module a command, imported when it is called; this one imports only the standard library,
so that `--help` and `--version` answer at once. A command is a function `run(argv) -> exit status`;
its errors become one clear line here: status 2 where the caller is at fault, 1 otherwise, 130 for
Ctrl-C, 143 for SIGTERM. Tracebacks only with `--debug`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command: the module that has its `run`, and what it does in one line.

    Args:
        has_environment: it takes `--env`.
        has_debugger: `--debug` means more to it than tracebacks.
    """

    module: str
    summary: str
    has_environment: bool = True
    has_debugger: bool = False


COMMANDS = {
    "process": Command("process", "make scored rollouts and write them to a JSONL file"),
    "evaluate": Command("evaluate_command", "measure a model: pass@k, pass^k, beside baselines"),
    "lm-eval": Command("lm_eval_command", "run tasks of lm-evaluation-harness on a model", False),
    "serve": Command("serve", "run an environment and serve its groups to trainers over HTTP"),
    "sft-gen": Command("sft_command", "write the best rollouts as rows for supervised training"),
    "run-api": Command("run_api", "serve trainers and others' environments, run none", False),
    "join": Command("join", "run an environment here for a server elsewhere"),
    "run": Command("run_command", "ask an environment's agent one question, keep what it did"),
    "export": Command("export_command", "write stored rollouts in another form, filtered", False),
    "verify": Command("verify_command", "check delivered tokens against the engine again", False),
    "score": Command("score_command", "score given answers, without any model"),
    "rescore": Command("rescore_command", "score stored rollouts again, or by another rubric"),
    "replay": Command("replay_command", "run one recorded rollout again", False, True),
    "scenarios": Command("scenarios_command", "run models in a scenario, keep traces", False),
    "convert": Command("convert_command", "make unified trajectories of other formats", False),
    "validate": Command("validate_command", "check files of unified trajectories", False),
    "sft": Command("sft_words_command", "build data for supervised fine-tuning", False),
    "merge": Command("merge_command", "make a model of others': base + alpha * (rl - sft)", False),
    "check": Command("check_command", "check that an environment's rewards cannot be cheated"),
    "models": Command("models_command", "start a model, make a tiny one, look at an engine", False),
    "token": Command("token_command", "make, list and revoke access tokens", False),
    "doctor": Command(
        "doctor_command", "show what this machine can do, sandboxes above all", False
    ),
    "list": Command("list_command", "show the environments that are installed", False),
}


def main(argv: Sequence[str] | None = None, *, environment: str | None = None) -> int:
    """Runs one command.

    Args:
        argv: the words after the program's name; unset: those of this process.
        environment: the environment that `--env` would name (`python -m environments.math ...`).

    Returns:
        The exit status.
    """
    _open_closed_streams()
    try:
        status = _main(argv, environment)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`): nothing more can be said on it.
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
    if environment is not None:
        rest = ["--env", environment, *rest]
    if debug and commands[name].has_debugger:
        rest.append("--debug")
    return _run(commands[name], rest, debug)


def _run(command: Command, argv: list[str], debug: bool) -> int:
    from envserver_records.errors import EnvserverError, UsageError

    try:
        module = importlib.import_module(f".{command.module}", __name__)
        return int(module.run(argv))
    except KeyboardInterrupt as stop:
        return int(getattr(stop, "status", 130))
    except BrokenPipeError:
        raise
    except EnvserverError as error:
        if debug:
            raise
        _complain(error.message, error.hint)
        return 2 if isinstance(error, UsageError) else 1
    except Exception as error:
        if debug:
            raise
        _complain(
            f"Internal error: {type(error).__name__}: {error}", "--debug shows the traceback."
        )
        return 1


def _open_closed_streams() -> None:
    """Gives stdin, stdout and stderr a place where they have none (`>&-`).

    The next file to be opened would else become one of them, and get what is printed.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode))


def _help(commands: dict[str, Command], environment: str | None) -> str:
    program = "envserver" if environment is None else f"python -m environments.{environment}"
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in commands.items()]
    example = "--env.total_steps 8 --model sim"
    if environment is None:
        example = f"--env math {example}"
    return "\n".join(
        [
            "Hosts environments in which language-model agents are trained.",
            "",
            f"Usage: {program} COMMAND [--name value ...] [--config run.yaml] [--debug]",
            "",
            "Commands:",
            *lines,
            "",
            f"For example: {program} process {example}",
            f"All settings of a command: {program} COMMAND --help",
        ]
    )


def _hint(name: str, commands: dict[str, Command]) -> str:
    import difflib

    near = difflib.get_close_matches(name, commands, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(commands)}."


def _complain(message: str, hint: str = "") -> None:
    red, plain = ("\033[31m", "\033[0m") if _colors() else ("", "")
    print(f"{red}envserver: {message}{plain}{f' {hint}' if hint else ''}", file=sys.stderr)


def _colors() -> bool:
    return sys.stderr.isatty() and "NO_COLOR" not in os.environ
