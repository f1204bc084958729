"""Merges model weights without torch: `base + alpha * (rl - sft)` and similar formulas.

In: folders as `save_pretrained` writes them (safetensors, whole or sharded; LoRA adapters). Only a
few megabytes of weights are in memory at a time; a folder is complete or absent; each merged value
is the formula computed in float32 (float64 where a weight is), rounded once to the base's dtype, to
nearest, ties to even.
"""

from __future__ import annotations

from .passes import Merged, merge
from .writing import Recipe, Vector

__all__ = ["Merged", "Recipe", "Vector", "merge"]
