"""Settings, errors and exit status shared by `python -m envserver_clients.sft` and
`envserver_clients.dpo`.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from envserver_records import ConfigError, ConflictError, EnvserverError, InputError
from envserver_records.extras import CLIENTS, install_command
from rich.console import Console

from .settings import FinetuneSettings

_NEEDED = ("torch", "transformers", "trl", "peft", "datasets", "jsonschema")


def check_libraries(settings: FinetuneSettings) -> None:
    """Checks that the libraries of these commands are installed.
    Raises ConfigError: a library is missing, or 4 bits are wanted without a LoRA.
    """
    missing = [name for name in _NEEDED if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(
            f"Training needs {', '.join(missing)}, which this Python does not have.",
            hint=install_command("train", CLIENTS),
        )
    if not settings.load_in_4bit:
        return
    if not settings.lora:
        raise ConfigError(
            "--load-in-4bit needs --lora: weights in 4 bits cannot be trained themselves.",
            hint="Add --lora, or leave --load-in-4bit out.",
        )
    if not importlib.util.find_spec("bitsandbytes"):
        raise ConfigError(
            "--load-in-4bit needs bitsandbytes, which this Python does not have.",
            hint=install_command("qlora", CLIENTS),
        )


def run_command(
    train: Callable[[Sequence[str] | None, Console], None], arguments: Sequence[str] | None
) -> int:
    """Runs a command. Exit status: 0 done, 2 wrong settings or rows, 1 other errors, 130 after
    Ctrl-C. In every case the same command continues."""
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, _end)
    _quiet()
    try:
        train(arguments, console)
    except (ConfigError, ConflictError, InputError) as error:
        tell(console, error)
        return 2
    except EnvserverError as error:
        tell(console, error)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped; the same command continues from the last checkpoint.")
        return 130
    return 0


def tell(console: Console, error: EnvserverError) -> None:
    """Prints an error in red; its text is not markup: `envserver[train]` keeps its brackets."""
    console.print("envserver:", style="red", end=" ")
    console.print(error.message, error.hint, markup=False, highlight=False, soft_wrap=True)


def _quiet() -> None:
    """Hides progress bars of short reads, and hints about deliberate choices."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)


def _end(number: int, frame: object) -> NoReturn:
    """Handles SIGTERM like Ctrl-C, so that everything is closed."""
    raise SystemExit(128 + number)
