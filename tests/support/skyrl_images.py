"""SkyRL's own model wrapper on rows with images from our adapter: python -m support.skyrl_images
FOLDER. Prints the largest difference of its logprobs from our policy's. Runs in .venv-trainers.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typing_extensions
from envserver_clients.adapters.skyrl import EnvserverGenerator, output_of
from envserver_clients.training.examples import ExampleSettings, examples_of, padded
from envserver_clients.training.policy import Policy
from envserver_records import InputError
from envserver_records.images import ImageSpan
from peers.learning.test_images import picture, row_of

from .tiny_vlm import main as make_tiny
from .trajectories import sequence, trajectory


def main(folder: Path) -> None:
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    # SkyRL's model imports two functions of flash-attn, for GPUs; it calls them to remove padding.
    padding: Any = types.ModuleType("flash_attn.bert_padding")
    padding.pad_input = padding.unpad_input = None
    sys.modules |= {"flash_attn": types.ModuleType("flash_attn"), padding.__name__: padding}
    from skyrl.backends.skyrl_train.training_batch import TensorList
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
    from transformers import AutoTokenizer

    make_tiny(folder, "qwen2_5_vl")
    rows = [
        row_of(folder, [picture(112, 84), picture(56, 112, 1)], seed=0),
        row_of(folder, [picture(56, 56, 2)], seed=1, said=12),
    ]
    made = []
    for number, row in enumerate(rows):
        own = sequence(row.tokens.tolist(), row.mask.tolist())
        one = trajectory(f"r{number}", own)
        for image in row.images:
            own.images.append(ImageSpan(image.sha256, image.offset, image.length, image.grid))
            one.images[image.sha256] = image.data
        made.append(one)
    processor = EnvserverGenerator("http://none", processor=str(folder))._processor
    told: Any = output_of(made, None, step_wise=False, processor=processor)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokens, attention, *_ = convert_prompts_responses_to_batch_tensors(
        tokenizer,
        told["prompt_token_ids"],
        told["response_ids"],
        [[0.0] * len(one) for one in told["response_ids"]],
        told["loss_masks"],
    )
    wrapper = HFModelWrapper(str(folder), bf16=False)
    with torch.no_grad():
        found = wrapper(
            tokens,
            max(map(len, told["response_ids"])),
            attention,
            pixel_values=TensorList(told["pixel_values"]),
            image_grid_thw=TensorList(told["image_grid_thw"]),
        )
    print(json.dumps({"difference": _difference(folder, rows, found), "refused": _refused(made)}))


def _difference(folder: Path, rows: list[Any], found: torch.Tensor) -> float:
    policy = Policy(str(folder))
    assert policy.vision is not None
    group: Any = type("Group", (), {"rows": rows, "group_id": "g"})
    rules = ExampleSettings(sees=policy.vision.fits, keep_zero=True)
    batch = padded(examples_of([group], 0, rules).examples)
    with torch.no_grad():
        own = policy.logprobs(batch)
    away = 0.0
    for place in range(len(rows)):
        said = own[place][torch.from_numpy(batch.mask[place, batch.first :] == 1)].numpy()
        theirs = found[place].numpy()[-len(said) :]  # SkyRL pads on the left
        away = max(away, float(np.abs(theirs - said).max()))
    return away


def _refused(made: list[Any]) -> list[str]:
    try:
        output_of(made, None, step_wise=False)
    except InputError as error:
        return [error.message]
    return []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
