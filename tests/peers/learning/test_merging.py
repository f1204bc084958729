"""Merged adapters against peft's merging."""

import json
from pathlib import Path

import pytest
import torch
from envserver_factory import Recipe, Vector, merge
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from support.cases import cases_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

CASES = cases_of(__file__)


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    made = LlamaForCausalLM(config)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return made


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def assert_merged(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    """The adapter in `lora` makes these weights of those in `base`."""
    merge(Recipe(folder / "base", (Vector(folder / "lora"),)), [folder / "made"])
    for name, value in weights(folder / "made").items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_an_adapter_is_what_peft_makes_of_it(tmp_path: Path, settings: dict[str, object]) -> None:
    model(0).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    everything = {"target_modules": ["q_proj", "o_proj", "up_proj"], "r": 4, **settings}
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **everything))
    torch.manual_seed(7)
    for weight in (one for one in adapted.parameters() if one.requires_grad):
        torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(tmp_path / "lora")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = PeftModel.from_pretrained(fresh, tmp_path / "lora").merge_and_unload()
    expected.save_pretrained(tmp_path / "expected")
    wanted, before = weights(tmp_path / "expected"), weights(tmp_path / "base")
    assert any(not torch.equal(wanted[name], before[name]) for name in wanted)
    assert_merged(tmp_path, wanted)


def test_an_adapter_of_another_base_is_merged_into_that_one(tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "other")):
        model(seed).save_pretrained(tmp_path / name)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    adapted = get_peft_model(other, LoraConfig(r=4, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "lora")  # lora_B is 0 at first: it is what it was
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "other")
    assert_merged(tmp_path, weights(tmp_path / "other"))
