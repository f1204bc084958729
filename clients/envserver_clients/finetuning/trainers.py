"""Creates TRL's trainers for examples that are already tokenised.

Invariant: the loss counts exactly the tokens that were counted as trained. TRL's own preparation,
which would render conversations again and train everything after the prompt, is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from envserver_records import ConfigError
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from .examples import (
    NOT_TRAINED,
    PAIR_COLUMNS,
    SFT_COLUMNS,
    Encoder,
    ExampleCounts,
    encoded_rows,
    pair_examples,
    sft_examples,
)
from .heldout import HeldOut
from .runs import Method, TrainerData
from .settings import DpoSettings, FinetuneSettings, SftSettings


def sft_trainer(settings: SftSettings, data: TrainerData) -> Any:
    arguments = SFTConfig(
        **_arguments(settings, data.folder),
        # No row is longer, and TRL packs whole rows only; rows for validation stay apart.
        max_length=settings.max_length if settings.packing else None,
        packing=settings.packing,
        eval_packing=False,
    )
    return _made(SFTTrainer, settings, arguments, data)


def dpo_trainer(settings: DpoSettings, data: TrainerData) -> Any:
    arguments = DPOConfig(
        **_arguments(settings, data.folder),
        beta=settings.beta,
        loss_type=settings.loss,
        label_smoothing=settings.label_smoothing,
        max_length=None,
        remove_unused_columns=False,
    )
    padding = data.tokenizer.pad_token_id
    collator = PairCollator(data.tokenizer.eos_token_id if padding is None else padding)
    return _made(_PairsTrainer, settings, arguments, data, data_collator=collator)


class _PairsTrainer(DPOTrainer):  # type: ignore[misc]  # a class of a library without types
    def _prepare_dataset(self, dataset: Any, *more: Any) -> Any:
        return dataset


class PairCollator:
    """Makes DPOTrainer's batches from pairs: all chosen, then all rejected."""

    def __init__(self, padding: int) -> None:
        self._padding = padding

    def __call__(self, pairs: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        """`input_ids`, `attention_mask` and `completion_mask`, each [2 x pairs, T]."""
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


def _made(
    trainer: Any, settings: FinetuneSettings, arguments: Any, data: TrainerData, **more: Any
) -> Any:
    try:
        made = trainer(
            model=settings.model,
            args=arguments,
            processing_class=data.tokenizer,
            train_dataset=data.train,
            eval_dataset=data.validation,
            callbacks=list(data.callbacks),
            peft_config=_lora(settings),
            quantization_config=quantization(settings),
            **more,
        )
    except (OSError, ValueError, ImportError) as error:  # of transformers, PEFT and TRL
        raise ConfigError(f"{settings.model} cannot be trained like this: {error}") from error
    if settings.load_in_4bit:
        _keep_precision(made.model)
    return made


def _keep_precision(model: Any) -> None:
    """Undoes what would round: TRL makes a quantised model's LoRA bfloat16, which loses small
    updates, and bitsandbytes on a CPU rounds the base's scales to bfloat16 at the first evaluation.
    """
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def quantization(settings: FinetuneSettings) -> Any:
    """The configuration of a 4-bit base (QLoRA, arXiv 2305.14314)."""
    if not settings.load_in_4bit:
        return None
    from transformers import BitsAndBytesConfig

    half = is_half(settings)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if half else torch.float32,
    )


def _lora(settings: FinetuneSettings) -> Any:
    """The LoRA configuration (arXiv 2106.09685)."""
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


def _arguments(settings: FinetuneSettings, folder: Path) -> dict[str, Any]:
    cuda = _has_gpu(settings)
    half = is_half(settings)
    return {
        "output_dir": str(folder),
        # Frozen weights may be 16-bit; trained ones would lose small updates.
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


def _has_gpu(settings: FinetuneSettings) -> bool:
    return settings.device == "auto" and torch.cuda.is_available()


def is_half(settings: FinetuneSettings) -> bool:
    if settings.dtype != "auto":
        return settings.dtype == "bfloat16"
    return _has_gpu(settings) and torch.cuda.is_bf16_supported()


def _heldout(
    settings: SftSettings, paths: Sequence[Path], encoder: Encoder, tokenizer: Any
) -> HeldOut:
    return HeldOut(
        tokenizer,
        lambda: encoded_rows(paths, encoder, ExampleCounts(), settings),
        batch_size=settings.batch_size,
        calls=settings.check_calls,
        half=is_half(settings),
    )


SFT: Final = Method(
    "sft", SFT_COLUMNS, sft_examples, sft_trainer, lambda given: given.turns == "last", _heldout
)
DPO: Final = Method("dpo", PAIR_COLUMNS, pair_examples, dpo_trainer)
