"""A mixture of experts routes tokens where the engine routed them, and learns what it would."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from envserver_clients.training.examples import Example
from envserver_clients.training.padding import Padded, padded
from envserver_clients.training.policy import LoraSettings, Policy
from envserver_records import ConfigError
from support.tiny_model import main as make_tiny
from torch import Tensor
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

torch.set_num_threads(1)
LAYERS, EXPERTS, EACH = 3, 8, 2


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    make_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def model(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture of experts whose second layer has none."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("experts")
    words = AutoTokenizer.from_pretrained(dense)
    words.save_pretrained(folder)
    sizes: dict[str, Any] = {
        "vocab_size": len(words), "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    mixture: dict[str, Any] = {
        "moe_intermediate_size": 16, "num_experts": EXPERTS, "num_experts_per_tok": EACH,
        "mlp_only_layers": [1], "norm_topk_prob": True, "initializer_range": 0.3,
    }  # fmt: skip
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **mixture)).save_pretrained(folder)
    return folder


def rows(seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    made = []
    for size in (9, 6, 12):
        mask = np.r_[[0] * 3, [1] * (size - 3)].astype(np.uint8)
        tokens = rng.integers(10, 200, size).astype(np.int32)
        made.append(Example(tokens, mask, np.zeros(size, np.float32), 1.0, 0.1))
    return made


def with_experts(made: list[Example], choose: Callable[[Example], np.ndarray]) -> list[Example]:
    return [dataclasses.replace(one, experts=choose(one)) for one in made]


def own_choices(policy: Policy, example: Example) -> np.ndarray:
    """What the model chooses by itself, as an engine tells it: without the last token."""
    found = np.zeros((len(example.tokens), LAYERS, EACH), np.uint8)
    layers = {layer: policy.model.model.layers[layer].mlp.gate for layer in (0, 2)}
    hooks = [
        gate.register_forward_hook(
            lambda _, __, out, layer=layer: found.__setitem__((slice(None), layer), out[2].numpy())
        )
        for layer, gate in layers.items()
    ]
    with torch.no_grad():
        policy.model(torch.from_numpy(example.tokens[None]).long())
    for hook in hooks:
        hook.remove()
    return found[:-1]


def others(example: Example) -> np.ndarray:
    rng = np.random.default_rng(len(example.tokens))
    made = [rng.permutation(EXPERTS)[:EACH] for _ in range((len(example.tokens) - 1) * LAYERS)]
    return np.array(made, np.uint8).reshape(-1, LAYERS, EACH)


def logprobs(policy: Policy, batch: Padded) -> Tensor:
    found = policy.logprobs(batch) * torch.from_numpy(batch.mask[:, batch.first :])
    return found.detach()


def test_replaying_its_own_choices_changes_nothing_and_others_do(model: Path) -> None:
    policy = Policy(str(model), replay_experts=True)
    plain = logprobs(policy, padded(rows()))
    own = with_experts(rows(), lambda one: own_choices(policy, one))
    assert torch.equal(logprobs(policy, padded(own)), plain)
    away = logprobs(policy, padded(with_experts(rows(), others))) - plain
    assert away.abs().max() > 0.1
    assert torch.equal(logprobs(policy, padded(rows())), plain)  # nothing stays


def test_the_weights_of_replayed_experts_are_the_routers_own(model: Path) -> None:
    """Against a router written down here."""
    policy = Policy(str(model), replay_experts=True)
    (example, *_) = with_experts(rows(), others)
    replayed = logprobs(policy, padded([example]))
    assert example.experts is not None
    chosen = torch.from_numpy(example.experts).long()
    plain = Policy(str(model))
    for layer in (0, 2):

        def routed(_: Any, __: Any, out: Any, layer: int = layer) -> Any:
            logits, _, indices = out
            indices = torch.cat([chosen[:, layer], indices[-1:]])  # the last one chooses itself
            weights = logits.softmax(-1).gather(-1, indices)
            return logits, weights / weights.sum(-1, keepdim=True), indices

        plain.model.model.layers[layer].mlp.gate.register_forward_hook(routed)
    expected = logprobs(plain, padded([dataclasses.replace(example, experts=None)]))
    assert torch.allclose(replayed, expected, atol=1e-6)


def gradient(policy: Policy, batch: Padded) -> dict[str, Tensor]:
    (policy.logprobs(batch) * torch.from_numpy(batch.mask[:, batch.first :])).sum().backward()
    return {name: one.grad for name, one in policy.trained.items() if one.grad is not None}


def test_rows_in_one_line_and_activations_computed_again_replay_the_same(model: Path) -> None:
    made = with_experts(rows(), others)
    made[1] = dataclasses.replace(made[1], experts=None)  # routes by itself
    expected = gradient(Policy(str(model), replay_experts=True), padded(made))
    assert any("gate.weight" in name for name in expected)  # the routers learn, too
    places = [(0, 0), (1, 0), (0, 9)]
    for policy, batch in (
        (Policy(str(model), replay_experts=True), padded(made, places)),
        (Policy(str(model), replay_experts=True, checkpointed=True), padded(made)),
    ):
        found = gradient(policy, batch)
        assert found.keys() == expected.keys()
        largest = max(float((found[name] - expected[name]).abs().max()) for name in expected)
        assert largest < 1e-4 * max(float(one.abs().max()) for one in expected.values())


def test_a_lora_replays_with_its_reference(model: Path) -> None:
    policy = Policy(str(model), replay_experts=True, lora=LoraSettings(2, targets="q_proj"))
    batch = padded(with_experts(rows(), others))
    trained = torch.from_numpy(batch.mask[:, batch.first :]) == 1
    assert torch.equal(
        policy.reference_logprobs(batch)[trained], policy.logprobs(batch).detach()[trained]
    )


def test_what_cannot_be_replayed_is_refused(model: Path, dense: Path) -> None:
    with pytest.raises(ConfigError, match="no router"):
        Policy(str(dense), replay_experts=True)
    policy = Policy(str(model), replay_experts=True)
    for wrong in (lambda one: others(one)[:, :2], lambda one: others(one) + EXPERTS):
        with pytest.raises(ConfigError, match="another model"):
            policy.logprobs(padded(with_experts(rows(), wrong)))
