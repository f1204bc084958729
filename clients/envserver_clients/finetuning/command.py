"""The life of `python -m envserver_clients.sft` and `envserver_clients.dpo`: settings, one training
after the other.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from envserver_records import ConfigError, ConflictError, EnvserverError, InputError
from rich.console import Console

_NEEDED = ("torch", "transformers", "trl", "peft", "datasets")


def check_libraries() -> None:
    """What these commands need is there.

    Raises:
        ConfigError: something is missing.
    """
    missing = [name for name in _NEEDED if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(
            f"This trains with {', '.join(missing)}, which this Python has not.",
            hint="pip install 'envserver-clients[train]'",
        )


def run_command(
    train: Callable[[Sequence[str] | None, Console], None], arguments: Sequence[str] | None
) -> int:
    """The command's exit status: 0 when all is done, 2 when settings or rows are wrong, 1 when it
    failed otherwise, 130 after Ctrl-C. Whatever it was, the same command goes on."""
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, _end)
    _quiet()
    try:
        train(arguments, console)
    except (ConfigError, ConflictError, InputError) as error:
        _tell(console, error)
        return 2
    except EnvserverError as error:
        _tell(console, error)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped; the same command goes on from the last checkpoint.")
        return 130
    return 0


def _tell(console: Console, error: EnvserverError) -> None:
    console.print(f"[red]Error:[/] {error.message}\n{error.hint}", highlight=False, soft_wrap=True)


def _quiet() -> None:
    """No bars for files that are read in no time, no hints at what we chose on purpose."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)


def _end(number: int, frame: object) -> NoReturn:
    """SIGTERM closes everything on its way out, as Ctrl-C does."""
    raise SystemExit(128 + number)
