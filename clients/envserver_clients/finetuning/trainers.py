"""Settings -> TRL's trainers, on examples that are tokens already.

What holds: what was counted as trained is what the loss counts. TRL's own preparation, which would
render conversations again and count all that follows the prompt, is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from envserver_records import ConfigError
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from .settings import DpoSettings, Settings, SftSettings
from .tokens import NOT_TRAINED


def sft_trainer(
    settings: SftSettings,
    tokenizer: Any,
    train: Any,
    validation: Any,
    folder: Path,
    callbacks: Sequence[TrainerCallback],
) -> Any:
    """TRL's SFTTrainer.

    Args:
        train: data set of `input_ids` and `labels`.
        validation: the same, or None.
        folder: of checkpoints.

    Raises:
        ConfigError: model or LoRA settings do not go together.
    """
    arguments = SFTConfig(**_arguments(settings, folder), max_length=None)
    return _made(
        SFTTrainer,
        settings,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=train,
        eval_dataset=validation,
        callbacks=list(callbacks),
    )


def dpo_trainer(
    settings: DpoSettings,
    tokenizer: Any,
    train: Any,
    validation: Any,
    folder: Path,
    callbacks: Sequence[TrainerCallback],
) -> Any:
    """TRL's DPOTrainer; arguments as of `sft_trainer`, of pairs."""
    arguments = DPOConfig(
        **_arguments(settings, folder),
        beta=settings.beta,
        loss_type=settings.loss,
        label_smoothing=settings.label_smoothing,
        max_length=None,
        remove_unused_columns=False,
    )
    padding = tokenizer.pad_token_id
    return _made(
        _PairsTrainer,
        settings,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=train,
        eval_dataset=validation,
        data_collator=PairCollator(tokenizer.eos_token_id if padding is None else padding),
        callbacks=list(callbacks),
    )


class _PairsTrainer(DPOTrainer):  # type: ignore[misc]  # a class of a library without types
    """Takes pairs that are tokens already, as SFTTrainer does by itself."""

    def _prepare_dataset(self, dataset: Any, *more: Any) -> Any:
        return dataset


class PairCollator:
    """Pairs -> the batch that DPOTrainer computes with: all chosen, then all rejected.

    Args:
        padding: token id behind shorter rows.
    """

    def __init__(self, padding: int) -> None:
        self._padding = padding

    def __call__(self, pairs: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        """`input_ids`, `attention_mask`, `completion_mask` (what counts), each [2 x pairs, T]."""
        rows = [
            (pair[f"{side}_ids"], pair[f"{side}_labels"])
            for side in ("chosen", "rejected")
            for pair in pairs
        ]
        shape = (len(rows), max(len(ids) for ids, _ in rows))
        tokens = torch.full(shape, self._padding)
        attention = torch.zeros(shape, dtype=torch.long)
        counted = torch.zeros(shape, dtype=torch.long)
        for number, (ids, labels) in enumerate(rows):
            tokens[number, : len(ids)] = torch.tensor(ids)
            attention[number, : len(ids)] = 1
            counted[number, : len(ids)] = (torch.tensor(labels) != NOT_TRAINED).long()
        return {
            "input_ids": tokens,
            "attention_mask": attention,
            "completion_mask": counted,
        }


def _made(trainer: Any, settings: Settings, **given: Any) -> Any:
    try:
        return trainer(model=settings.model, peft_config=_lora(settings), **given)
    except (OSError, ValueError) as error:  # what transformers, PEFT and TRL refuse
        raise ConfigError(f"{settings.model} cannot be trained like this: {error}") from error


def _lora(settings: Settings) -> Any:
    """LoRA (arXiv 2106.09685), None where all weights are trained."""
    if not settings.lora:
        return None
    from peft import LoraConfig

    targets = settings.lora_targets
    return LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
        task_type="CAUSAL_LM",
    )


def _arguments(settings: Settings, folder: Path) -> dict[str, Any]:
    """What both configurations have."""
    cuda = settings.device == "auto" and torch.cuda.is_available()
    half = settings.dtype == "bfloat16" or (
        settings.dtype == "auto" and cuda and torch.cuda.is_bf16_supported()
    )
    return {
        "output_dir": str(folder),
        # Frozen weights may be halves; those that are trained would lose small updates.
        "model_init_kwargs": {"dtype": "bfloat16" if half and settings.lora else "float32"},
        "bf16": half,
        "use_cpu": not cuda,
        "dataloader_pin_memory": cuda,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "per_device_train_batch_size": settings.batch_size,
        "per_device_eval_batch_size": settings.batch_size,
        "gradient_accumulation_steps": settings.accumulate,
        "learning_rate": settings.rate,
        "lr_scheduler_type": settings.schedule,
        "warmup_steps": settings.warmup,
        "num_train_epochs": settings.epochs,
        "max_steps": settings.steps or -1,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.most_gradient,
        "seed": settings.seed,
        "data_seed": settings.seed,
        "logging_steps": settings.log_every,
        "save_strategy": "steps",
        "save_steps": settings.checkpoint_every,
        "save_total_limit": 2,
        "eval_strategy": "steps" if settings.validate_every else "no",
        "eval_steps": settings.validate_every,
        "disable_tqdm": True,
        "report_to": "none",
    }
