"""All steps: files of experts -> a folder with weights, tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .architecture import new_model
from .conversations import END_OF_TURN, read_conversations, texts
from .tokenizer import PADDING, VOCABULARY, save_tokenizer, token_id, trained_tokenizer
from .training import ProgressCallback, TrainingPlan, supervise


def make(
    experts: Sequence[Path],
    folder: Path,
    *,
    seed: int,
    steps: int,
    threads: int,
    report: ProgressCallback,
) -> None:
    """Writes the model.

    Args:
        experts: files of `envserver process`, one for each kind of task; trained on in turn.
        folder: made here.
    """
    kinds = [read_conversations(path) for path in experts]
    tokenizer = trained_tokenizer(texts(one for kind in kinds for one in kind))
    model = new_model(
        seed=seed,
        vocabulary=VOCABULARY,
        end_of_turn=token_id(tokenizer, END_OF_TURN),
        padding=token_id(tokenizer, PADDING),
    )
    supervise(
        model, tokenizer, kinds, TrainingPlan(steps=steps, threads=threads, seed=seed), report
    )
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
