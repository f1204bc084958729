"""The documentation's recipe for a LoRA with TRL, on a CPU: python trl_recipe.py ITS OPTIONS.

TRL's asynchronous trainer asks for the speed of a GPU, and for an attention kernel of GPUs.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing
from trl_trainers import plain_attention

RECIPE = Path(__file__).parents[2] / "docs" / "recipes" / "trl" / "lora.py"

if __name__ == "__main__":
    torch.set_num_threads(1)
    async_grpo_trainer.get_peak_flops_per_device = lambda *about: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=plain_attention)
    runpy.run_path(str(RECIPE), run_name="__main__")
