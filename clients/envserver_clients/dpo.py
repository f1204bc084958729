"""Preference training with TRL on pairs that `envserver export --to dpo` wrote.

    python -m envserver_clients.dpo --model FOLDER --data data/dpo --output out/dpo --lora

Invariants: of both answers only tokens that the assistant wrote count, even if tools
answered in between; after a kill the same command continues to the same weights. See
`envserver_clients/finetuning/README.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from envserver_clients.finetuning.conversation import parts_of
from envserver_clients.finetuning.settings import (
    DpoSettings,
    check_libraries,
    read_settings,
    run_command,
)


def train(arguments: Sequence[str] | None, console: Console) -> None:
    settings = read_settings(DpoSettings, "dpo", arguments)
    parts = parts_of(settings.data, whole=True)
    check_libraries(settings)
    from envserver_clients.finetuning.runs import Training, prepare
    from envserver_clients.finetuning.trainers import DPO

    prepare(settings)
    for part in parts:
        Training(settings, DPO, part, settings.output, console).run()


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(train, arguments)


if __name__ == "__main__":
    sys.exit(main())
