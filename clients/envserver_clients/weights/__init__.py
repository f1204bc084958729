"""Transfers new weights from a trainer to its engines, checks them and publishes their version.

    push = Lora("http://127.0.0.1:8000", Path("out/weights"), server=client)
    push.publish(17, model.save_pretrained, PromptCheck(prompt_ids, completion_ids, logprobs))

The README.md beside this file says which of the four classes to use, what each check finds and
what to do about each failure. Only `Transfer` needs torch.
"""

from __future__ import annotations

from .check import PromptCheck, WeightsMismatch, WeightsNotSaved
from .engines import Timeouts
from .full import LocalFull, VllmFull
from .links import Wire
from .lora import Lora
from .push import Published, WeightPush
from .transfer import Transfer

__all__ = [
    "LocalFull",
    "Lora",
    "PromptCheck",
    "Published",
    "Timeouts",
    "Transfer",
    "VllmFull",
    "WeightPush",
    "WeightsMismatch",
    "WeightsNotSaved",
    "Wire",
]
