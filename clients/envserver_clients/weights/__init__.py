"""New weights from a trainer to its engines, checked, and their version to the server.

    push = Lora("http://127.0.0.1:8000", Path("out/weights"), server=client)
    push.publish(17, model.save_pretrained, PromptCheck(prompt_ids, completion_ids, logprobs))

Which of the three ways is for whom, what each guard catches and what is to be done about each
failure stands in the README.md beside this file. Nothing here needs torch.
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
