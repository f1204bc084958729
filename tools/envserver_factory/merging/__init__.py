"""Merges model weights without torch: `base + alpha * (rl - sft)` and similar formulas.

In: folders as `save_pretrained` writes them (safetensors, whole or sharded; LoRA adapters). Out:
for each alpha a folder that can be served. Only a few megabytes of weights are in memory at a time,
however large a tensor is; a folder is complete or absent; each merged value is the formula computed
in float32 (float64 where a weight is), rounded once to the base's dtype, to nearest, ties to even.

    tensors.py   safetensors files, read in pieces; stored numbers <-> numpy
    writing.py   safetensors files, written in pieces; folders that appear when complete
    adapters.py  LoRA adapters as the models they make of their base
    vectors.py   task vectors as files
    recipe.py    what is merged, and with which weights
    checks.py    do the models fit together: tensors, configs, tied output layers, tokenizers
    passes.py    the one pass over all inputs
    card.py      README.md and merge.json: how the model was made
    mergekit.py  methods other than arithmetic, by the program `mergekit-yaml`
"""

from __future__ import annotations

from .passes import Merged, merge
from .recipe import Recipe, Vector

__all__ = ["Merged", "Recipe", "Vector", "merge"]
