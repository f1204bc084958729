"""Merges model weights without torch: `base + alpha * (rl - sft)` and similar formulas.

In: folders as `save_pretrained` writes them (safetensors, whole or sharded; LoRA adapters). Out:
for each alpha a folder that can be served. Only a few megabytes of weights are in memory at a time,
however large a tensor is; a folder is complete or absent; each merged value is the formula computed
in float32 (float64 where a weight is), rounded once to the base's dtype, to nearest, ties to even.

    tensors.py   safetensors files and LoRA adapters, read in pieces; stored numbers <-> numpy
    recipe.py    what is merged, and with which weights
    writing.py   safetensors files, written in pieces; folders that appear when complete, with
                 README.md and merge.json: how the model was made
    checks.py    do the models fit together: tensors, configs, tied output layers, tokenizers;
                 methods other than arithmetic, by the program `mergekit-yaml`
    passes.py    the one pass over all inputs; task vectors as files
"""

from __future__ import annotations

from .passes import Merged, merge
from .recipe import Recipe, Vector

__all__ = ["Merged", "Recipe", "Vector", "merge"]
