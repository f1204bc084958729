"""Makes the model: tokenizer, architecture, supervised start; the same weights for the same seed.

The pieces of an expert's conversation, joined, are the text that its chat template renders, and
exactly the model's own text is marked as said. The loss covers only the model's own tokens. The
model first learns right answers from the rewarded conversations, then from all of them how rarely
the expert gives them: that leaves room for RL to improve.

The tokenizer has byte pairs of what the model reads and says, and a token for each digit. Any text
can be encoded, and decoding gives it back. Text is split as Qwen2 splits it, since that is what
transformers makes of any tokenizer of a Qwen2 model, whatever its files say.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from envserver_records.errors import InputError
from envserver_records.records import Json, Message
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import Qwen2Config, Qwen2ForCausalLM

from envserver.tokens.chat_format import ChatTemplate

TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
_TEMPLATE = ChatTemplate(TEMPLATE, {})
END_OF_TURN = "<|im_end|>"


class Piece(NamedTuple):
    """A part of a conversation's text; `said`: the model says it, so that it is trained on."""

    text: str
    said: bool


@dataclass(frozen=True)
class Conversation:
    """One rollout of an expert; the same expert makes the same one under the same id.

    `right`: it got the full reward. `messages`, `tools`: as sent to the engine.
    """

    rollout_id: str
    right: bool
    messages: list[Message]
    tools: list[Json]

    def pieces(self) -> list[Piece]:
        pieces, before = [], ""
        for place, message in enumerate(self.messages):
            if message["role"] != "assistant":
                continue
            prompt = _render(self.messages[:place], self.tools, add_generation_prompt=True)
            after = _render(self.messages[: place + 1], self.tools, add_generation_prompt=False)
            said, end, rest = after.removeprefix(prompt).rpartition(END_OF_TURN)
            pieces += [Piece(prompt.removeprefix(before), False), Piece(said + end, True)]
            before = after.removesuffix(rest)
        return pieces

    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces())


def read_conversations(path: Path) -> list[Conversation]:
    """All rollouts with a reward in a file of groups, sorted by id."""
    found: list[Conversation] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found += _of_group(json.loads(line))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise InputError(f"{path}, line {number} is not a group: {error!r}.") from error
    if not found:
        raise InputError(f"{path} holds no conversation.")
    return sorted(found, key=lambda rollout: rollout.rollout_id)


def texts(conversations: Iterable[Conversation]) -> list[str]:
    return sorted({conversation.text() for conversation in conversations})


def _of_group(group: Json) -> Iterator[Conversation]:
    for rollout in group["envserver"]["rollouts"]:
        messages = group["messages"][rollout["rows"][0]]
        if rollout["reward"] is not None and messages:
            yield Conversation(
                rollout["rollout_id"], rollout["reward"] == 1.0, messages, rollout["tools"]
            )


def _render(messages: list[Message], tools: list[Json], *, add_generation_prompt: bool) -> str:
    return _TEMPLATE.render(messages, tools, generation_prompt=add_generation_prompt, kwargs={})


VOCABULARY = 512
PADDING = "<|endoftext|>"
SPECIAL = (PADDING, "<|im_start|>", END_OF_TURN)
TOOL_MARKS = ("<tool_call>", "</tool_call>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern by which Qwen2 splits text before byte pairs, from its tokenizer.json."""


def trained_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """A tokenizer of VOCABULARY tokens; the same texts give the same one. Ids that are left when
    every word of `texts` is one token stay unused."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = [*SPECIAL, *TOOL_MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=1,
        show_progress=False,
        special_tokens=marks,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The parsers of tool calls read these: keep them when special tokens are skipped.
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in TOOL_MARKS])
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    return int(tokenizer.encode(token, add_special_tokens=False).ids[0])


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        additional_special_tokens=list(SPECIAL),
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


MAX_TOKENS = 2048


def new_model(*, seed: int, vocabulary: int, end_of_turn: int, padding: int) -> Any:
    """Makes a Qwen2ForCausalLM with random weights, the same for the same seed.

    The head size is 64, the smallest that vLLM supports on a CPU. The embeddings are not tied to
    the head, because vLLM on a CPU does not reload tied weights correctly.
    """
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=192,
            intermediate_size=576,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            max_position_embeddings=MAX_TOKENS,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=end_of_turn,
            pad_token_id=padding,
        )
    )


ProgressCallback = Callable[[int, float], None]
"""Called after each step with the number of steps done and the loss."""

_NO_LOSS = -100


@dataclass(frozen=True)
class TrainingPlan:
    """Settings of the training.

    `right`: share of the steps with rewarded conversations only. `batch_tokens`: approximate number
    of tokens per step. `learning_rate`: maximum; it rises in the first steps and falls to a
    twentieth. `threads`: another number sums in another order and gives other weights.
    """

    steps: int = 500
    right: float = 0.75
    batch_tokens: int = 1600
    learning_rate: float = 3e-3
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True)
class TrainingRow:
    """Token ids, and as targets those that the model says (others are _NO_LOSS)."""

    ids: list[int]
    targets: list[int]


def supervise(
    model: Any,
    tokenizer: Tokenizer,
    kinds: Sequence[Sequence[Conversation]],
    plan: TrainingPlan,
    report: ProgressCallback,
) -> None:
    """Trains `model` in place, by batches of each of `kinds` (of conversations) in turn."""
    torch.set_num_threads(plan.threads)
    rows = [[(example.right, _row(example, tokenizer)) for example in kind] for kind in kinds]
    first = int(plan.steps * plan.right)
    phases = [
        *_batches([[row for right, row in kind if right] for kind in rows], first, plan, "right"),
        *_batches([[row for _, row in kind] for kind in rows], plan.steps - first, plan, "all"),
    ]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    model.train()
    for step, batch in enumerate(phases):
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * _rate(step, plan.steps)
        loss = _loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report(step + 1, loss.item())
    model.eval()


def _row(conversation: Conversation, tokenizer: Tokenizer) -> TrainingRow:
    row = TrainingRow([], [])
    for piece in conversation.pieces():
        ids = tokenizer.encode(piece.text, add_special_tokens=False).ids
        row.ids.extend(ids)
        row.targets.extend(ids if piece.said else [_NO_LOSS] * len(ids))
    return row


def _batches(
    kinds: list[list[TrainingRow]], steps: int, plan: TrainingPlan, name: str
) -> list[list[TrainingRow]]:
    """Batches of each kind in turn; rows are used equally often, give or take one."""
    rng = random.Random(f"{plan.seed}-{name}")
    sizes = [max(1, plan.batch_tokens // max(len(row.ids) for row in kind)) for kind in kinds]
    waiting: list[list[TrainingRow]] = [[] for _ in kinds]
    batches = []
    for step in range(steps):
        turn = step % len(kinds)
        left, size = waiting[turn], sizes[turn]
        while len(left) < size:
            more = list(kinds[turn])
            rng.shuffle(more)
            left.extend(more)
        batches.append(left[:size])
        del left[:size]
    return batches


def _rate(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / 20)
    return warm * max(0.05, 0.5 * (1 + math.cos(math.pi * step / steps)))


def _loss(model: Any, batch: list[TrainingRow]) -> Any:
    longest = max(len(row.ids) for row in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    targets = torch.full((len(batch), longest), _NO_LOSS)
    for place, row in enumerate(batch):
        ids[place, : len(row.ids)] = torch.tensor(row.ids)
        targets[place, : len(row.ids)] = torch.tensor(row.targets)
    # Padding stands behind all that is looked at, so that no mask is needed; and the head is
    # asked only for what is said.
    said = targets[:, 1:] != _NO_LOSS
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[said]), targets[:, 1:][said])


def make(
    experts: Sequence[Path],
    folder: Path,
    *,
    seed: int,
    steps: int,
    threads: int,
    report: ProgressCallback,
) -> None:
    """Writes the model to `folder`. `experts`: files of `envserver process`, one for each kind of
    task; trained on in turn."""
    kinds = [read_conversations(path) for path in experts]
    tokenizer = trained_tokenizer(texts(example for kind in kinds for example in kind))
    model = new_model(
        seed=seed,
        vocabulary=VOCABULARY,
        end_of_turn=token_id(tokenizer, END_OF_TURN),
        padding=token_id(tokenizer, PADDING),
    )
    supervise(
        model, tokenizer, kinds, TrainingPlan(steps=steps, threads=threads, seed=seed), report
    )
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
