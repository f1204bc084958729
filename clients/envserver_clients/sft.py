"""Supervised fine-tuning with TRL on exported data: a LoRA or all weights.

    python -m envserver_clients.sft --model FOLDER --data data/sft --output out/sft --lora
    python -m envserver_clients.sft --model FOLDER --data data/messages.jsonl --output out/sft

For a folder of `envserver sft build` each tool gets a separate model in a folder below `--output`;
`--tool NAME` trains only that one, in `--output` itself; `--whole` trains one model for all tools.
Invariants: only tokens that the assistant wrote are trained, with any chat template
(`finetuning/examples.py`); after a kill the same command continues to the same weights. See
`envserver_clients/finetuning/README.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from envserver_clients.finetuning.conversation import parts_of
from envserver_clients.finetuning.settings import (
    SftSettings,
    check_libraries,
    read_settings,
    run_command,
)


def train(arguments: Sequence[str] | None, console: Console) -> None:
    """Trains the models, one after the other."""
    settings = read_settings(SftSettings, "sft", arguments)
    parts = parts_of(settings.data, tool=settings.tool, whole=settings.whole)
    check_libraries(settings)
    from envserver_clients.finetuning.runs import Training, prepare
    from envserver_clients.finetuning.trainers import SFT

    prepare(settings)
    for part in parts:
        below = part.tool is not None and settings.tool is None
        output = settings.output / str(part.tool) if below else settings.output
        Training(settings, SFT, part, output, console).run()


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(train, arguments)


if __name__ == "__main__":
    sys.exit(main())
