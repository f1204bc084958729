"""Transfers new weights from a trainer to its engines, checks them and publishes their version.

    push = Lora("http://127.0.0.1:8000", Path("out/weights"), server=client)
    push.publish(17, model.save_pretrained, PromptCheck(prompt_ids, completion_ids, logprobs))

The README.md beside this file says which of the four classes to use, what each check finds and
what to do about each failure. Only `Transfer` needs torch.
"""

from __future__ import annotations

from .engines import PromptCheck, Timeouts, WeightsMismatch, WeightsNotSaved
from .full import LocalFull, Lora, VllmFull
from .push import Published, WeightPush
from .transfer import Transfer, Wire

__all__ = [
    "LocalFull", "Lora", "PromptCheck", "Published", "Timeouts", "Transfer", "VllmFull",
    "WeightPush", "WeightsMismatch", "WeightsNotSaved", "Wire",
]  # fmt: skip
