"""The trainer on rows with images: three families of vision-language models, tiny and random."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from envserver_clients.records import Row
from envserver_clients.training.examples import BatchExamples, ExampleSettings, examples_of, padded
from envserver_clients.training.learner import Learner, StepSettings
from envserver_clients.training.policy import LoraSettings, Policy
from envserver_records.images import RowImage, sha256_of
from PIL import Image
from support.rows_to_learn import group, row
from support.tiny_vlm import main as make_tiny
from transformers import AutoImageProcessor, AutoModelForImageTextToText


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of random colours in squares of seven pixels."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 7, width // 7, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def shown(folder: Path, data: bytes) -> tuple[list[int], tuple[int, ...]]:
    """The tokens that the model's own processor makes of one image, and its grid."""
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

    config: Any = AutoConfig.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids
    processor: Any = AutoImageProcessor.from_pretrained(folder)
    made = processor(images=[[Image.open(io.BytesIO(data)).convert("RGB")]], return_tensors="pt")
    if "image_grid_thw" in made:
        grid = tuple(made["image_grid_thw"][0].tolist())
        length = int(np.prod(grid)) // config.vision_config.spatial_merge_size**2
        start, end = ids(["<|vision_start|>", "<|vision_end|>"])
        return [start, *[config.image_token_id] * length, end], grid
    around = ids("<fake_token_around_image>")
    parts = int(made["pixel_values"].shape[1])  # each of four tokens, as `tiny_vlm.py` says
    return [*[around, *[config.image_token_id] * 4] * parts, around], ()


def row_of(folder: Path, images: list[bytes], *, said: int = 7, seed: int = 0, **more: Any) -> Row:
    """A row with random words around its images, of which the last `said` tokens are trained."""
    rng = np.random.default_rng(seed)
    tokens, spans = rng.integers(10, 4000, 3).tolist(), []
    for data in images:
        ids, grid = shown(folder, data)
        spans.append(RowImage(sha256_of(data), len(tokens), len(ids), data, grid))
        tokens += [*ids, *rng.integers(10, 4000, 2).tolist()]
    mask = [0] * len(tokens) + [1] * said
    tokens += rng.integers(10, 4000, said).tolist()
    given = (tokens, mask, float(seed % 2), seed)
    return row(*given, logprobs=-8, images=spans, **more)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "idefics3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    make_tiny(made, request.param)
    return made


def batch_of(rows: list[Row], policy: Policy) -> BatchExamples:
    assert policy.vision is not None
    rules = ExampleSettings(vocabulary=policy.vocabulary, sees=policy.vision.fits)
    return examples_of([group(*rows)], 0, rules)


def of_transformers(folder: Path, row: Row) -> torch.Tensor:
    """Logprobs [T-1] of a row alone, by transformers' model and processor."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor: Any = AutoImageProcessor.from_pretrained(folder)
    ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
    more: dict[str, Any] = {}
    if row.images:
        read = [Image.open(io.BytesIO(one.data)).convert("RGB") for one in row.images]
        more = dict(processor(images=[read], return_tensors="pt"))
        if "image_grid_thw" in more:
            more["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, **more).logits[0, :-1].log_softmax(-1)
    return logits.gather(-1, ids[0, 1:, None])[:, 0]


def test_the_policy_sees_what_transformers_sees(folder: Path) -> None:
    """Rows with two images, one and none, in one padded micro-batch."""
    first, second, other = picture(112, 84), picture(56, 112, 1), picture(112, 84, 2)
    rows = [
        row_of(folder, [first, second, first], seed=0),
        row_of(folder, [second], seed=1, said=12),
        row_of(folder, [], seed=2),
        row_of(folder, [first], seed=3),
        row_of(folder, [other], seed=3),
    ]
    policy = Policy(str(folder))
    examples = batch_of(rows, policy).examples
    assert len(examples) == len(rows)
    batch = padded(examples)
    with torch.no_grad():
        found = policy.logprobs(batch)
    for place, held in enumerate(rows):
        trained = torch.from_numpy(batch.mask[place, batch.first :] == 1)
        expected = of_transformers(folder, held)[held.mask[1:] == 1]
        assert found[place][trained].tolist() == pytest.approx(expected.tolist(), abs=5e-5)
    assert (found[3] - found[4]).abs().max() > 0.1  # the same tokens behind another image


def test_a_step_learns_from_images(folder: Path, tmp_path: Path) -> None:
    """The layers that see get a gradient; what engines load has the processor beside it."""
    policy = Policy(str(folder), keep_reference=True)
    rows = [row_of(folder, [picture(112, 84, seed)], seed=seed) for seed in range(4)]
    examples = batch_of(rows, policy).examples
    assert "skipped" not in Learner(policy, StepSettings(learning_rate=1e-3)).step(examples)
    seeing = [one for name, one in policy.trained.items() if ".vis" in name]
    assert seeing and all(one.grad is not None and one.grad.any() for one in seeing)
    policy.save(tmp_path)
    again = Policy(str(tmp_path))
    batch = padded(batch_of(rows, again).examples)
    with torch.no_grad():
        found = again.logprobs(batch)
        assert torch.allclose(found, policy.logprobs(batch), atol=1e-6)
        assert not torch.allclose(found, policy.reference_logprobs(batch), atol=1e-3)


def test_a_lora_is_of_the_language_alone(folder: Path) -> None:
    policy = Policy(str(folder), lora=LoraSettings(2))
    assert policy.trained
    assert all(".language_model." in name or ".text_model." in name for name in policy.trained)
    rows = [row_of(folder, [picture(112, 84)], seed=seed) for seed in range(2)]
    batch = padded(batch_of(rows, policy).examples)
    assert torch.equal(policy.logprobs(batch), policy.reference_logprobs(batch))


def test_rows_whose_images_make_other_tokens_are_left_out(folder: Path) -> None:
    """An engine with another processor, a damaged file, an image's token without its image."""
    policy = Policy(str(folder))
    good = row_of(folder, [picture(112, 84)], seed=1)
    (image,) = good.images
    for wrong in (
        {"data": picture(28, 56), "sha256": "other"},
        {"data": b"\x89PNG\r\n\x1a\n", "sha256": "damaged"},
        {"grid": (1, 2, 2)},
        {"offset": image.offset + 3},
        None,
    ):
        images = [] if wrong is None else [msgspec.structs.replace(image, **wrong)]
        bad = dataclasses.replace(good, reward=0.0, trajectory=0, images=images)
        learned = batch_of([good, bad], policy)
        assert len(learned.examples) == 1
        assert learned.numbers["rows_bad_images"] == 1
