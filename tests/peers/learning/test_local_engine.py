"""The local engine against transformers itself: logprobs, batches, weights, adapters, versions.

Everything is float32 on one thread. What the engine tells of a token is held against a plain
forward pass of transformers over the whole sequence, with its own attention and no cache.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from envserver_local import weights
from envserver_local.__main__ import Options
from envserver_local.generation import Generator, Settings, chosen, filtered
from envserver_local.kv_cache import NAME
from envserver_local.server import Loaded, check, load
from envserver_local.text import Row, Sampling
from envserver_local.weights import Adapters
from envserver_records.errors import ConfigError, InputError
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from support.cases import cases_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

CASES = cases_of(__file__)

# Sums in another order differ by up to 1e-5, by the processor; what is computed wrongly by more.
TOLERANCE = 5e-5
PROMPTS = [[5, 6, 7], list(range(300, 340)), [1, 428, 201, 3941, 2, 201, 1, 2729, 201], [9]]


def float32(folder: Path, **more: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    quieter = float32(model)
    # Its logits are in the tens, where two float32 passes of transformers differ by 2e-5.
    quieter.lm_head.weight.data *= 0.25
    quieter.save_pretrained(made)
    AutoTokenizer.from_pretrained(model).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load(Options(model=str(folder), device="cpu"))


@pytest.fixture
def batch(loaded: Loaded) -> Generator:
    return Generator(loaded.model, Adapters(loaded.model))


@pytest.fixture(scope="module")
def plain(folder: Path) -> PreTrainedModel:
    return float32(folder)


def row(prompt: Sequence[int], count: int = 12, **settings: object) -> Row:
    return Row(list(prompt), Sampling(max_tokens=count, **{"seed": 7, **settings}))


def run(batch: Generator, steps: int, *joining: Row) -> None:
    if joining:
        batch.join(list(joining))
    for _ in range(steps):
        batch.step()


def logits_of(model: PreTrainedModel, one: Row) -> torch.Tensor:
    """Those before each sampled token, by a plain pass over prompt and answer."""
    with torch.no_grad():
        return model(torch.tensor([one.prompt + one.ids])).logits[0, len(one.prompt) - 1 : -1]


def of_ids(logits: torch.Tensor, one: Row) -> torch.Tensor:
    """The logprobs of a row's sampled tokens."""
    return logits.log_softmax(-1).gather(1, torch.tensor(one.ids)[:, None])[:, 0]


def off(model: PreTrainedModel, *rows: Row) -> float:
    """The largest difference to what a plain pass says."""
    return max(
        (of_ids(logits_of(model, one), one) - torch.tensor(one.logprobs)).abs().max().item()
        for one in rows
    )


def test_logprobs_are_those_of_a_plain_pass(batch: Generator, plain: PreTrainedModel) -> None:
    """Also behind a prompt that is so long that it is read in parts."""
    rng = random.Random(5)
    long = row([rng.randrange(300, 4000) for _ in range(3000)])
    rows = [row(prompt, seed=place) for place, prompt in enumerate(PROMPTS)]
    run(batch, 4, long, *rows)
    batch.leave(long)
    run(batch, 36)
    assert off(plain, long, *rows) < TOLERANCE


def test_rows_join_and_leave_while_others_go_on(batch: Generator, plain: PreTrainedModel) -> None:
    rng = random.Random(3)
    live: list[Row] = []
    everyone: list[Row] = []
    for step in range(60):
        if step % 3 == 0 and len(live) < 9:
            prompt = [rng.randrange(300, 4000) for _ in range(rng.randrange(1, 200))]
            come = [row(prompt, seed=step + place) for place in range(rng.randrange(1, 4))]
            batch.join(come)
            live += come
            everyone += come
        batch.step()
        if step % 4 == 3:
            batch.leave(live.pop(rng.randrange(len(live))))
    assert off(plain, *everyone) < TOLERANCE


def test_a_row_is_the_same_alone_in_company_and_displaced(batch: Generator) -> None:
    alone, beside, parted = (row(PROMPTS[2], 16, seed=11) for _ in range(3))
    run(batch, 16, alone)
    batch.leave(alone, keep=False)
    run(batch, 16, row(PROMPTS[1], seed=1), beside, *(row([40 + place]) for place in range(30)))
    assert beside.ids == alone.ids
    assert (torch.tensor(beside.logprobs) - torch.tensor(alone.logprobs)).abs().max() < TOLERANCE
    run(batch, 5, parted)
    batch.leave(parted, keep=False)
    run(batch, 11, row(PROMPTS[1]), parted)
    assert parted.ids == alone.ids


def test_a_conversation_goes_on_from_what_is_kept(batch: Generator, plain: PreTrainedModel) -> None:
    first = row(PROMPTS[1])
    run(batch, 20, first)
    batch.leave(first)
    following = [row([*first.tokens, 77, 78], seed=place) for place in range(3)]
    batch.join(following)
    assert batch.prefixes.found == 3 * (len(first.tokens) - 1)
    run(batch, 8)
    assert off(plain, *following) < TOLERANCE


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])
    for settings in ({}, {"temperature": 0.5}, {"top_p": 0.7}, {"top_k": 2}, {"min_p": 0.2}):
        count = 4_000
        rows = [row([1], seed=place, **settings) for place in range(count)]
        table = Settings(rows, torch.device("cpu"))
        many = logits.expand(count, -1)
        found = chosen(many, table, torch.zeros(count, dtype=torch.int64).numpy())
        expected = logits / rows[0].sampling.temperature
        expected = filtered(expected, table.top_k[:1], table.top_p[:1], table.min_p[:1])
        seen = torch.bincount(found, minlength=5) / count
        assert (seen - expected.softmax(-1)[0]).abs().max() < 0.04


@pytest.mark.parametrize("processed", [False, True])
def test_logprobs_are_from_before_or_after_temperature_and_filters(
    loaded: Loaded, plain: PreTrainedModel, processed: bool
) -> None:
    batch = Generator(loaded.model, Adapters(loaded.model), processed=processed)
    warm = row(PROMPTS[1], temperature=0.7, top_k=50)
    run(batch, 4, warm)
    logits = logits_of(plain, warm)
    if processed:
        logits = logits / 0.7
        logits = logits.masked_fill(logits < logits.topk(50).values[:, -1:], float("-inf"))
    assert warm.logprobs == pytest.approx(of_ids(logits, warm).tolist(), abs=1e-3)


@pytest.mark.parametrize(("limits", "kept"), CASES["filters"])
def test_filters_keep_what_they_say(limits: dict[str, float], kept: list[int]) -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()[None]
    every = {"top_k": 1 << 60, "top_p": 1.0, "min_p": 0.0, **limits}
    found = filtered(logits, *(torch.tensor([[value]]) for value in every.values()))
    assert found[0].isfinite().nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_replaced_exactly(folder: Path, tmp_path: Path, tied: bool) -> None:
    config = AutoConfig.from_pretrained(folder, tie_word_embeddings=tied, initializer_range=0.05)
    for name in ("old", "new"):
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
            tmp_path / name
        )
    served = float32(tmp_path / "old", attn_implementation=NAME)
    batch = Generator(served, Adapters(served))
    run(batch, 3, row(PROMPTS[1]))
    weights.reload(served, tmp_path / "new")
    batch.prefixes.clear()
    fresh = row(PROMPTS[1], seed=8)
    run(batch, 10, fresh)
    assert off(float32(tmp_path / "new"), fresh) < TOLERANCE
    assert (served.lm_head.weight is served.model.embed_tokens.weight) is tied


def test_weights_that_do_not_fit_change_nothing(loaded: Loaded, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    (name, value), *others = before.items()
    short = {**before, name: value[:-1].clone()}
    for place, bad in enumerate(({**before, "x": torch.zeros(1)}, dict(others), short)):
        where = tmp_path / str(place)
        where.mkdir()
        save_file(bad, where / "model.safetensors")
        with pytest.raises(InputError):
            weights.reload(loaded.model, where)
    with pytest.raises(InputError, match="no weights"):
        weights.reload(loaded.model, tmp_path / "nowhere")
    after = loaded.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def adapter(folder: Path, into: Path, seed: int, **settings: object) -> PreTrainedModel:
    """Saves a random adapter; the model with it merged into its weights."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=16, target_modules=targets, **settings)
    torch.manual_seed(seed)
    worn = get_peft_model(float32(folder), config)
    for name, value in worn.named_parameters():
        if "lora_B" in name:
            value.data.normal_(std=0.1)
    worn.save_pretrained(into)
    merged: PreTrainedModel = worn.merge_and_unload().eval()
    return merged


def test_adapters_beside_each_other_equal_merged_weights(
    folder: Path, loaded: Loaded, plain: PreTrainedModel, tmp_path: Path
) -> None:
    merged = [
        adapter(folder, tmp_path / "1", 1),
        adapter(folder, tmp_path / "2", 2, use_rslora=True),
    ]
    adapters = Adapters(loaded.model)
    batch = Generator(loaded.model, adapters)
    worn = [adapters.load(f"policy@{place}", tmp_path / str(place)) for place in (1, 2)]
    rows = [row(PROMPTS[1], seed=place) for place in range(6)]
    for place, one in enumerate(rows):
        one.adapter = [None, *worn][place % 3]
    run(batch, 5, *rows)
    # Requests in flight keep the adapter that they began with.
    adapters.unload("policy@1")
    adapters.load("policy@2", tmp_path / "1", replace=True)
    run(batch, 10)
    assert adapters.find("policy@1") is None
    for place, one in enumerate(rows):
        assert off([plain, *merged][place % 3], one) < TOLERANCE
    with pytest.raises(InputError, match="already"):
        adapters.load("policy@2", tmp_path / "2")
    with pytest.raises(InputError, match="no LoRA adapter"):
        adapters.load("other", tmp_path)


SIZES = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 500),
    **dict.fromkeys(("hidden_size", "intermediate_size", "n_embd", "moe_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "n_layer", "num_experts"), 4),
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
FAMILIES = ("llama", "mistral", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "gpt2")


@pytest.mark.parametrize("family", [*FAMILIES, "mamba", "bloom"])
def test_what_is_not_computed_as_by_transformers_is_refused(family: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    if family in FAMILIES:
        assert check(Generator(model, Adapters(model))) < TOLERANCE
    else:
        with pytest.raises(ConfigError, match="local engine"):
            check(Generator(model, Adapters(model)))
