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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from envserver_clients.finetuning.conversation import parts_of
from envserver_clients.finetuning.settings import (
    SftSettings,
    check_libraries,
    read_settings,
    run_command,
)

if TYPE_CHECKING:
    from envserver_clients.finetuning.examples import Encoder, Example, ExampleCounts
    from envserver_clients.finetuning.heldout import HeldOut


def train(arguments: Sequence[str] | None, console: Console) -> None:
    """Trains the models, one after the other."""
    settings = read_settings(SftSettings, "sft", arguments)
    parts = parts_of(settings.data, tool=settings.tool, whole=settings.whole)
    check_libraries(settings)
    from envserver_clients.finetuning.examples import SFT_COLUMNS
    from envserver_clients.finetuning.runs import Method, Training, prepare
    from envserver_clients.finetuning.trainers import sft_trainer

    prepare(settings)
    method = Method(
        "sft", SFT_COLUMNS, _examples, sft_trainer, lambda given: given.turns == "last", _heldout
    )
    for part in parts:
        below = part.tool is not None and settings.tool is None
        output = settings.output / str(part.tool) if below else settings.output
        Training(settings, method, part, output, console).run()


def _examples(
    settings: SftSettings, paths: Sequence[Path], encoder: Encoder, counts: ExampleCounts
) -> Iterator[Example]:
    from envserver_clients.finetuning.examples import sft_examples

    return sft_examples(
        paths,
        encoder,
        counts,
        max_length=settings.max_length,
        too_long=settings.too_long,
        prompts=settings.prompts,
    )


def _heldout(
    settings: SftSettings, paths: Sequence[Path], encoder: Encoder, tokenizer: Any
) -> HeldOut:
    from envserver_clients.finetuning.examples import ExampleCounts, Limits, encoded_rows
    from envserver_clients.finetuning.heldout import HeldOut
    from envserver_clients.finetuning.trainers import is_half

    limits = Limits(settings.max_length, settings.too_long)
    return HeldOut(
        tokenizer,
        lambda: encoded_rows(paths, encoder, ExampleCounts(), limits, prompts=settings.prompts),
        batch_size=settings.batch_size,
        calls=settings.check_calls,
        half=is_half(settings),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(train, arguments)


if __name__ == "__main__":
    sys.exit(main())
