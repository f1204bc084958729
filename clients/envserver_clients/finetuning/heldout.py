"""Measures a model on held-out rows: perplexity, and how good its turns and tool calls are.

Invariants: means are over trained tokens or over turns, whatever the batches; a turn's tokens are
predicted from the ids that an engine would have had before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from .conversation import Tools, are_valid, calls_in
from .examples import Encoded, Span, batches

Row = tuple[Encoded, Tools | None]

PREFIX: Final = "heldout_"
_MOST_TOKENS: Final = 1024
"""Maximum tokens of a call that the model writes."""


@dataclass
class _Sums:
    """Sums over turns: of minus log-probabilities, of tokens, and of right choices."""

    loss: float = 0.0
    tokens: int = 0
    tokens_right: int = 0
    turns: int = 0
    turns_right: int = 0

    def add(self, loss: torch.Tensor, right: torch.Tensor) -> None:
        self.loss += float(loss.double().sum())
        self.tokens += len(right)
        self.tokens_right += int(right.sum())
        self.turns += 1
        self.turns_right += int(right.all())

    def means(self) -> dict[str, float]:
        if not self.turns:
            return {}
        return {
            "loss": self.loss / self.tokens,
            "token_accuracy": self.tokens_right / self.tokens,
            "turn_accuracy": self.turns_right / self.turns,
        }


@dataclass
class _Calls:
    checked: int = 0
    valid: int = 0
    right_tool: int = 0
    same: int = 0


@dataclass
class HeldOut:
    """Measures on rows.

    `rows`: examples with the tools that were offered; called for each measurement. `calls`: maximum
    number of tool calls that the model writes. `half`: compute in bfloat16.
    """

    tokenizer: Any
    rows: Callable[[], Iterator[Row]]
    batch_size: int
    calls: int
    half: bool

    def measure(self, model: Any) -> dict[str, float]:
        """Returns `heldout_loss` (mean over trained tokens), `heldout_perplexity`,
        `heldout_token_accuracy`, `heldout_turn_accuracy` (turns whose every token is the most
        likely one), the same of turns that call tools (`heldout_call_...`), and the fractions of
        written calls that are valid, name the right tool, and equal the row's (`heldout_calls_...`,
        greedy). Numbers without a denominator are left out."""
        everything, called, written = _Sums(), _Sums(), _Calls()
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=self.half):
                for batch in batches(self.rows(), self.batch_size):
                    self._score(model, batch, device, everything, called)
                    self._write(model, batch, device, written)
        finally:
            model.train(was_training)
        found = everything.means()
        if found:
            found["perplexity"] = math.exp(min(found["loss"], 700.0))
        found |= {f"call_{name}": value for name, value in called.means().items()}
        if written.checked:
            found["calls_checked"] = written.checked
            found["calls_valid"] = written.valid / written.checked
            found["calls_right_tool"] = written.right_tool / written.checked
            found["calls_same"] = written.same / written.checked
        return {PREFIX + name: value for name, value in found.items()}

    def _score(
        self, model: Any, batch: Sequence[Row], device: Any, everything: _Sums, called: _Sums
    ) -> None:
        longest = max(len(row.ids) for row, _ in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        attention = torch.zeros_like(ids)
        for number, (row, _) in enumerate(batch):
            ids[number, : len(row.ids)] = torch.tensor(row.ids)
            attention[number, : len(row.ids)] = 1
        logits = model(input_ids=ids.to(device), attention_mask=attention.to(device)).logits[:, :-1]
        targets = ids[:, 1:].to(device)
        logprobs = logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0].cpu()
        right = (logits.argmax(-1) == targets).cpu()
        for number, (row, _) in enumerate(batch):
            for start, end in row.turns():
                place = slice(max(start - 1, 0), end - 1)
                turn = (-logprobs[number, place], right[number, place])
                if not len(turn[1]):
                    continue  # the first token has nothing before it
                everything.add(*turn)
                if (start, end) in row.calls:
                    called.add(*turn)

    def _write(self, model: Any, batch: Sequence[Row], device: Any, written: _Calls) -> None:
        """Has the model write calls; those whose form in the row is not recognised are skipped."""
        for row, tools in batch:
            for span in row.calls:
                if written.checked >= self.calls:
                    return
                wanted = calls_in(self.tokenizer.decode(row.ids[slice(*span)]))
                if not are_valid(wanted, tools):
                    continue
                calls = calls_in(self._answer(model, row, span, device))
                names = [[call.name for call in side] for side in (calls, wanted)]
                written.checked += 1
                written.valid += are_valid(calls, tools)
                written.right_tool += names[0] == names[1]
                written.same += calls == wanted

    def _answer(self, model: Any, row: Encoded, span: Span, device: Any) -> str:
        start, end = span
        prompt = torch.tensor([row.ids[:start]], device=device)
        ends = [row.ids[end - 1], self.tokenizer.eos_token_id]
        padding = self.tokenizer.pad_token_id
        ids = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(2 * (end - start) + 32, _MOST_TOKENS),
            do_sample=False,
            use_cache=True,
            eos_token_id=[token for token in ends if token is not None],
            pad_token_id=ends[0] if padding is None else padding,
        )
        text: str = self.tokenizer.decode(ids[0, start:])
        return text
