"""A mixture of experts routes tokens where the engine routed them, and learns what it would."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from envserver_clients.training.examples import Example, Padded, padded
from envserver_clients.training.policy import LoraSettings, Policy
from envserver_records import ConfigError
from torch import Tensor
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

LAYERS, EXPERTS, EACH = 3, 8, 2


@pytest.fixture(scope="module")
def experts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random mixture of experts whose second layer has none."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("experts")
    words = AutoTokenizer.from_pretrained(model)
    words.save_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        head_dim=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=16,
        num_experts=EXPERTS,
        num_experts_per_tok=EACH,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        initializer_range=0.3,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def policy(experts: str) -> Policy:
    return Policy(experts, replay_experts=True)


def rows(choose: Callable[[Example], np.ndarray | None] = lambda _: None) -> list[Example]:
    """Three, with the experts that are chosen for them."""
    rng = np.random.default_rng(0)
    made = []
    for size in (9, 6, 12):
        mask = (np.arange(size) >= 3).astype(np.uint8)
        tokens = rng.integers(10, 200, size).astype(np.int32)
        one = Example(tokens, mask, np.zeros(size, np.float32), 1.0, 0.1)
        made.append(replace(one, experts=choose(one)))
    return made


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


def trained(policy: Policy, batch: Padded) -> Tensor:
    """The logprobs of the trained tokens, 0 elsewhere."""
    return policy.logprobs(batch) * torch.from_numpy(batch.mask[:, batch.first :])


def logprobs(policy: Policy, examples: list[Example]) -> Tensor:
    return trained(policy, padded(examples)).detach()


def test_replaying_its_own_choices_changes_nothing_and_others_do(policy: Policy) -> None:
    plain = logprobs(policy, rows())
    assert torch.equal(logprobs(policy, rows(lambda one: own_choices(policy, one))), plain)
    assert (logprobs(policy, rows(others)) - plain).abs().max() > 0.1
    assert torch.equal(logprobs(policy, rows()), plain)  # nothing stays


def test_the_weights_of_replayed_experts_are_the_routers_own(policy: Policy, experts: str) -> None:
    """Against a router written down here."""
    (example, *_) = rows(others)
    replayed = logprobs(policy, [example])
    assert example.experts is not None
    chosen = torch.from_numpy(example.experts).long()
    plain = Policy(experts)
    for layer in (0, 2):

        def routed(_: Any, __: Any, out: Any, layer: int = layer) -> Any:
            logits, _, indices = out
            indices = torch.cat([chosen[:, layer], indices[-1:]])  # the last one chooses itself
            weights = logits.softmax(-1).gather(-1, indices)
            return logits, weights / weights.sum(-1, keepdim=True), indices

        plain.model.model.layers[layer].mlp.gate.register_forward_hook(routed)
    assert torch.allclose(replayed, logprobs(plain, [replace(example, experts=None)]), atol=1e-6)


def gradient(policy: Policy, batch: Padded) -> dict[str, Tensor]:
    trained(policy, batch).sum().backward()
    return {name: one.grad for name, one in policy.trained.items() if one.grad is not None}


def test_packed_rows_and_checkpointed_activations_replay_it(policy: Policy, experts: str) -> None:
    made = rows(others)
    made[1] = replace(made[1], experts=None)  # routes by itself
    expected = gradient(policy, padded(made))
    assert any("gate.weight" in name for name in expected)  # the routers learn, too
    for checkpointed, places in ((False, [(0, 0), (1, 0), (0, 9)]), (True, None)):
        other = Policy(experts, replay_experts=True, checkpointed=checkpointed)
        found = gradient(other, padded(made, places))
        assert found.keys() == expected.keys()
        largest = max(float((found[name] - expected[name]).abs().max()) for name in expected)
        assert largest < 1e-4 * max(float(one.abs().max()) for one in expected.values())


def test_a_lora_replays_with_its_reference(experts: str) -> None:
    policy = Policy(experts, replay_experts=True, lora=LoraSettings(2, targets="q_proj"))
    batch = padded(rows(others))
    counted = torch.from_numpy(batch.mask[:, batch.first :]) == 1
    assert torch.equal(
        policy.reference_logprobs(batch)[counted], policy.logprobs(batch).detach()[counted]
    )


def test_what_cannot_be_replayed_is_refused(policy: Policy, model: Path) -> None:
    with pytest.raises(ConfigError, match="no router"):
        Policy(str(model), replay_experts=True)
    for wrong in (lambda one: others(one)[:, :2], lambda one: others(one) + EXPERTS):
        with pytest.raises(ConfigError, match="another model"):
            policy.logprobs(padded(rows(wrong)))
