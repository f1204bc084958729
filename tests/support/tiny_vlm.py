"""A tiny random model that sees images: python -m support.tiny_vlm FOLDER KIND, the kind
qwen2_5_vl, qwen3_vl or idefics3.

The forms of Qwen2.5-VL, Qwen3-VL and Idefics3 (SmolVLM's, which cuts images into parts), with one
or two layers and a head size of 64, served by vLLM on a CPU. Their processors are the real ones;
without torchvision those of Qwen are saved without their part for videos, which vLLM needs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import is_torchvision_available

from .tiny_model import END_OF_TURN, VOCABULARY, tokenizer

QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
IDEFICS = [
    *("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
]
IMAGE = {"qwen": "<|vision_start|><|image_pad|><|vision_end|>", "idefics": "<image>"}
TEXT = {
    "vocab_size": VOCABULARY + 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}


def words_of(kind: str) -> Any:
    words = tokenizer()
    more = IDEFICS if kind == "idefics3" else QWEN
    words.add_special_tokens(
        {"additional_special_tokens": more}, replace_extra_special_tokens=False
    )
    template = (Path(__file__).parent / "chat_templates/vision.jinja").read_text()
    image = IMAGE["idefics" if kind == "idefics3" else "qwen"]
    words.chat_template = template.replace("IMAGE", image)
    return words


def qwen(words: Any, kind: str, initializer_range: float) -> tuple[Any, list[Any]]:
    ids = {
        f"{name}_token_id": words.convert_tokens_to_ids(f"<|{text}|>")
        for name, text in (
            *(("image", "image_pad"), ("video", "video_pad")),
            *(("vision_start", "vision_start"), ("vision_end", "vision_end")),
        )
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    text = {**TEXT, "rope_parameters": rope, "eos_token_id": words.eos_token_id}
    text["initializer_range"] = initializer_range
    vision = {"depth": 2, "num_heads": 2, "hidden_size": 128, "intermediate_size": 256}
    if kind == "qwen2_5_vl":
        vision |= {"out_hidden_size": 128, "patch_size": 14, "window_size": 112}
        vision |= {"fullatt_block_indexes": [1], "initializer_range": initializer_range}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
        image = transformers.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=448 * 448)
        whole, video = transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor
    else:
        rope["mrope_interleaved"] = True
        vision |= {"out_hidden_size": 128, "patch_size": 16}
        vision["initializer_range"] = initializer_range
        vision |= {"num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
        config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
        model = transformers.Qwen3VLForConditionalGeneration(config)
        sizes = {"shortest_edge": 32 * 32, "longest_edge": 448 * 448}
        image = transformers.Qwen2VLImageProcessor(patch_size=16, size=sizes)
        whole, video = transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor
    return model, [whole(image, words, video())] if is_torchvision_available() else [image, words]


def idefics(words: Any) -> tuple[Any, list[Any]]:
    text = {**TEXT, "model_type": "llama", "eos_token_id": words.eos_token_id, "pad_token_id": 0}
    vision = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    config = transformers.Idefics3Config(
        text_config=text,
        vision_config={**vision, "initializer_range": 0.2},
        scale_factor=2,
        image_token_id=words.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    processor = transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessor(
            size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
        ),
        words,
        image_seq_len=4,
    )
    return transformers.Idefics3ForConditionalGeneration(config), [processor]


def main(folder: Path, kind: str, initializer_range: float = 0.2) -> None:
    words = words_of(kind)
    torch.manual_seed(0)
    model, parts = idefics(words) if kind == "idefics3" else qwen(words, kind, initializer_range)
    model.lm_head.weight.data[words.convert_tokens_to_ids(END_OF_TURN)] *= 3
    model.save_pretrained(folder)
    for part in parts:
        part.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
