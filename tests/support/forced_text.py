"""A logits processor of vLLM that has a random model say a text: each `~` in it is a token of the
model's own choice among those of small letters, all else is said as it stands; then the turn ends.

It runs after the engine has noted the model's own logprobs, so that they score again the same; a
grammar would change them. Runs in .venv-vllm.

In: `extra_args` of a request's sampling parameters, {"said": text}.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

LETTERS = re.compile("Ġ?[a-z]+")
"""Ġ is a space in a byte-level tokenizer."""


class ForcedText(AdapterLogitsProcessor):
    """See the module."""

    def __init__(self, vllm_config, device, is_pin_memory):
        super().__init__(vllm_config, device, is_pin_memory)
        folder = Path(vllm_config.model_config.tokenizer)
        self._words = Tokenizer.from_file(str(folder / "tokenizer.json"))
        vocabulary = self._words.get_vocab()
        self._end = vocabulary["<|im_end|>"]
        self._free = sorted(
            number for token, number in vocabulary.items() if LETTERS.fullmatch(token)
        )

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        said = (params.extra_args or {}).get("said")
        if said is None:
            return None
        allowed = []
        for part in re.split("(~)", said):
            ids = self._words.encode(part, add_special_tokens=False).ids
            allowed += [self._free] if part == "~" else [[number] for number in ids]
        return partial(_among, [*allowed, [self._end]])


def _among(allowed, output_ids, logits):
    ids = torch.tensor(allowed[len(output_ids)])
    kept = torch.full_like(logits, -torch.inf)
    kept[ids] = logits[ids]
    return kept
