"""Preference training with TRL on pairs that `envserver export --to dpo` wrote.

    python -m envserver_clients.dpo --model FOLDER --data data/dpo --output out/dpo --lora

Invariants: of both answers only tokens that the assistant wrote count, even if tools
answered in between; after a kill the same command continues to the same weights. See
`envserver_clients/finetuning/README.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from envserver_clients.finetuning.conversation import parts_of
from envserver_clients.finetuning.settings import (
    DpoSettings,
    check_libraries,
    read_settings,
    run_command,
)

if TYPE_CHECKING:
    from envserver_clients.finetuning.examples import Encoder, Example, ExampleCounts


def train(arguments: Sequence[str] | None, console: Console) -> None:
    settings = read_settings(DpoSettings, "dpo", arguments)
    parts = parts_of(settings.data, whole=True)
    check_libraries(settings)
    from envserver_clients.finetuning.examples import PAIR_COLUMNS
    from envserver_clients.finetuning.runs import Method, Training, prepare
    from envserver_clients.finetuning.trainers import dpo_trainer

    prepare(settings)
    method = Method("dpo", PAIR_COLUMNS, _examples, dpo_trainer)
    for part in parts:
        Training(settings, method, part, settings.output, console).run()


def _examples(
    settings: DpoSettings, paths: Sequence[Path], encoder: Encoder, counts: ExampleCounts
) -> Iterator[Example]:
    from envserver_clients.finetuning.examples import pair_examples

    return pair_examples(
        paths,
        encoder,
        counts,
        max_length=settings.max_length,
        too_long=settings.too_long,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(train, arguments)


if __name__ == "__main__":
    sys.exit(main())
