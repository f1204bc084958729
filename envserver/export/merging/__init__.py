"""Models made of others' weights, without torch: `base + alpha * (rl - sft)` and its like.

In: folders as `save_pretrained` writes them (safetensors, whole or in shards; LoRA adapters). Out:
for each alpha a folder that can be served as it is. What holds: of all weights only a few megabytes
are in memory at a time, however large a tensor is; a folder is there whole or not at all; each
merged value is the formula computed in float32 (float64 where a weight is), rounded once to the
dtype of the base, to nearest, ties to even.

    dtypes.py    numbers as they are stored <-> numpy
    tensors.py   safetensors files, read in pieces
    writing.py   safetensors files, written in pieces; folders that appear when they are whole
    adapters.py  LoRA adapters as the models that they make of their base
    recipe.py    what is merged, and with which weights
    checks.py    whether the models fit together: tensors, configs, tied output layers
    vocabulary.py  whether their tokenizers do
    passes.py    the one pass over all inputs
    card.py      README.md and merge.json: how the model was made
    mergekit.py  methods other than arithmetic, by the program `mergekit-yaml`
"""

from __future__ import annotations

from .passes import Merged, merge
from .recipe import Recipe, Vector

__all__ = ["Merged", "Recipe", "Vector", "merge"]
