"""Transfers new weights from a trainer to its engines, checks them and publishes their version.

    push = Lora("http://127.0.0.1:8000", Path("out/weights"), server=client)
    push.publish(17, model.save_pretrained, PromptCheck(prompt_ids, completion_ids, logprobs))

The README.md beside this file says which of the three classes to use, what each check finds and
what to do about each failure. Nothing here needs torch.
"""

from __future__ import annotations

from .check import PromptCheck
from .engines import Timeouts
from .errors import WeightsMismatch, WeightsNotSaved
from .full import LocalFull, VllmFull
from .lora import Lora
from .push import Published, WeightPush

__all__ = [
    "LocalFull",
    "Lora",
    "PromptCheck",
    "Published",
    "Timeouts",
    "VllmFull",
    "WeightPush",
    "WeightsMismatch",
    "WeightsNotSaved",
]
