"""Steps of the learner that one process and several ranks make alike.

    torchrun --nproc-per-node 2 -m support.rank_cases MODEL FOLDER DEVICE CASE ...

writes each case's gradient into FOLDER, goes on from the checkpoint in FOLDER/one, leaves one of
its own in FOLDER/two, and saves the model and a LoRA. Runs in .venv-learn.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from envserver_clients.records import Row
from envserver_clients.training.checkpoints import CheckpointInfo, Checkpoints
from envserver_clients.training.examples import Denominator, Example, ExampleSettings, examples_of
from envserver_clients.training.learner import Learner, Numbers, StepSettings
from envserver_clients.training.objectives import OBJECTIVES, LossSettings
from envserver_clients.training.policy import LoraSettings, Policy
from envserver_clients.training.ranks import Ranks, whole
from envserver_clients.training.settings import TrainerSettings
from envserver_records.images import RowImage
from envserver_records.sampling import SamplingSpan
from envserver_records.tasks import Json
from peers.learning.test_images import picture

from .rows_to_learn import group
from .rows_to_learn import row as row_of
from .tiny_model import VOCABULARY

PROMPT = 5
_IMAGE_TOKEN = VOCABULARY + 2  # `<|image_pad|>` of the tiny model
STEPS = 2
TOKENS = [5, 6, 7, 8, 9]
UNBOUNDED = LossSettings(clip_low=0.999, clip_high=1e6, correction="none")


@dataclass(frozen=True)
class Case:
    """A batch and how to learn from it.

    Args:
        lengths: completions' lengths; a group has four.
        objective: a preset, which has its own denominator and bounds.
        images: every third row has one, for a model in `MODEL/sees`.
        micro_batch_tokens: rows of very different lengths make the ranks' numbers of passes uneven.
    """

    denominator: Denominator = "trajectory"
    packed: bool = False
    lengths: tuple[int, ...] = (3, 24, 7, 4, 19, 5, 11, 30, 6, 9, 2, 14)
    micro_batch_tokens: int = 64
    updates: int = 1
    reduce_each: bool = False
    checkpointed: bool = False
    lora: LoraSettings | None = None
    dtype: str = "float32"
    temperature: float = 1.0
    objective: str = ""
    images: bool = False
    bounds: LossSettings = field(default_factory=lambda: LossSettings(correction="none"))


CASES = {
    **{
        f"{denominator}{', packed' if packed else ''}": Case(denominator, packed)
        for denominator in ("trajectory", "token", "constant")
        for packed in (False, True)
    },
    "images in some rows": Case(images=True),
    "images and a reference": Case(images=True, bounds=LossSettings(kl_weight=0.1), updates=2),
    "fewer rows than ranks": Case(lengths=(9, 9, 9, 9), micro_batch_tokens=1000),
    **{name: Case(objective=name, packed=True) for name in OBJECTIVES},
    "gradients of each pass": Case(reduce_each=True),
    "activations again": Case(checkpointed=True),
    "activations again, packed": Case(packed=True, checkpointed=True),
    "two updates": Case(updates=2, packed=True),
    "distance to the reference": Case(bounds=LossSettings(kl_weight=0.1), packed=True),
    "LoRA": Case(lora=LoraSettings(4, alpha=4, targets="q_proj,v_proj"), temperature=0.7),
    "LoRA in bfloat16": Case(
        lora=LoraSettings(4), dtype="bfloat16", checkpointed=True, packed=True, bounds=UNBOUNDED
    ),
    # Without bounds: rounding moves tokens across them.
    "bfloat16, exactly": Case(bounds=UNBOUNDED),
    "bfloat16": Case(dtype="bfloat16", bounds=UNBOUNDED),
}


def rows_of(case: Case, seed: int = 0) -> list[Example]:
    """Random rows with a tool's tokens in between and random logprobs; one group in three is all
    equal, and of one trajectory in a group of one only one row remains to learn from."""
    rng = np.random.default_rng(seed)
    groups: dict[str, list[Row]] = {}
    for number, own in enumerate(case.lengths):
        length, name = PROMPT + own, f"g{number // 4}"
        mask = np.arange(length) >= PROMPT
        mask[PROMPT + 2 : PROMPT + 4] = False
        row = row_of(
            rng.integers(10, 4000, length),
            mask,
            float(number % 4 == 0 or (4 <= number < 8 and len(case.lengths) > 4)),
            number % 4,
            logprobs=rng.uniform(-9, -8, length),
            components={"right": float(number % 4 == 0), "short": float(own < 10)},
            sampling=[SamplingSpan(PROMPT, length, case.temperature, "processed")],
        )
        if case.images and number % 3 == 0:
            row.tokens[1:PROMPT] = _IMAGE_TOKEN
            data = picture(56, 56, number)  # four tokens
            row.images.append(RowImage(str(number), 1, PROMPT - 1, data))
        groups.setdefault(name, []).append(row)
    how = ExampleSettings(
        denominator=case.denominator,
        constant_tokens=20,
        keep_zero=case.bounds.kl_weight > 0,
        sees=(lambda row: True) if case.images else None,
    )
    if case.objective:
        how = settings(case).examples()
    found = examples_of([group(*rows, name=name) for name, rows in groups.items()], 0, how).examples
    return found[:1] if len(case.lengths) == 4 else found


def settings(case: Case) -> TrainerSettings:
    weights = {"right": 1.0, "short": 0.5} if case.objective == "gdpo" else {}
    return TrainerSettings(
        model="-", output=Path("-"), objective=case.objective, reward_weights=weights
    )


def near(model: Path, rows: list[Example]) -> list[Example]:
    """The rows with delivered logprobs that are almost the model's own."""
    policy, rng = Policy(str(model)), np.random.default_rng(0)
    found = []
    for row in rows:
        own = np.array([0.0, *policy.prompt_logprobs(row.tokens.tolist())])
        delivered = (own + rng.normal(0, 0.1, len(own))) * row.mask
        found.append(replace(row, logprobs=delivered.astype(np.float32)))
    return found


def learner(case: Case, model: Path, ranks: Ranks) -> Learner:
    torch.manual_seed(0)
    policy = Policy(
        str(model / "sees" if case.images else model),
        lora=case.lora,
        dtype=getattr(torch, case.dtype),
        keep_reference=case.bounds.kl_weight > 0,
        checkpointed=case.checkpointed,
        ranks=ranks,
    )
    if case.lora is not None:  # its second matrix is 0 at the start, and the first without gradient
        with torch.no_grad():
            for value in policy.trained.values():
                value.add_(0.01)
    rules = StepSettings(
        learning_rate=1e-3,
        loss=settings(case).loss() if case.objective else case.bounds,
        most_gradient=1e9,
        micro_batch_tokens=case.micro_batch_tokens,
        packed=case.packed,
        updates=case.updates,
        reduce_each=case.reduce_each,
    )
    return Learner(policy, rules, ranks)


def stepped(case: Case, model: Path, ranks: Ranks) -> tuple[Json, Numbers]:
    """The gradient of a step, whole, and its numbers."""
    one = learner(case, model, ranks)
    rows = rows_of(case)
    numbers = one.step(near(model, rows) if case.objective else rows)
    named = one.policy.trained.items()
    return {
        name: whole(value.grad).cpu() for name, value in named if value.grad is not None
    }, numbers


@dataclass(frozen=True)
class Run:
    """Steps from a checkpoint on; `keep` leaves the next one behind."""

    learner: Learner
    checkpoints: Checkpoints
    info: CheckpointInfo
    weights: Json

    def keep(self) -> None:
        self.checkpoints.save(self.info, self.learner.state)

    def keep_part(self, saved: CheckpointInfo) -> None:
        self.checkpoints.save_part(saved, self.learner.state())


def continued(model: Path, folder: Path, ranks: Ranks, steps: int) -> Run:
    """Makes steps after the last checkpoint in `folder`."""
    case = Case(packed=True)
    one, kept = learner(case, model, ranks), Checkpoints(folder, ranks=ranks)
    saved = kept.latest()
    if saved is not None:
        one.load_state(kept.load(saved, one.blank_state))
    first = saved.step if saved else 0
    for step in range(first, first + steps):
        one.step(rows_of(case, step))
    weights = {name: whole(value).cpu() for name, value in one.policy.state().items()}
    return Run(one, kept, CheckpointInfo(first + steps, first + steps), weights)


def trained(model: Path, folder: Path, steps: int) -> Json:
    """The weights after such steps of one process, which are kept in `folder`."""
    run = continued(model, folder, Ranks(), steps)
    run.keep()
    return run.weights


def main(model: Path, folder: Path, device: str, *cases: str) -> None:
    with Ranks.joined(device) as ranks:
        policies = {"whole": Policy(str(model), ranks=ranks, dtype=torch.bfloat16)}
        policies |= {"lora": learner(CASES["LoRA"], model, ranks).policy}

        def case(name: str) -> None:
            made = stepped(CASES[name], model, ranks)
            if ranks.leads:
                torch.save(made, folder / f"{name}.pt")

        runs: list[Run] = []

        def train(name: str) -> None:
            runs.append(continued(model, folder / name, ranks, STEPS))

        if not ranks.leads:
            for policy in policies.values():
                ranks.follow(
                    {
                        "case": case,
                        "train": train,
                        "save_part": lambda saved: runs[-1].keep_part(saved),
                        "prompt_logprobs": policy.prompt_logprobs,
                        "tensors": lambda policy=policy: deque(policy.tensors(), maxlen=0),
                    }
                )
            return
        for name in cases:
            with ranks.together("case", name):
                case(name)
        for name in ("one", "two"):
            with ranks.together("train", name):
                train(name)
            runs[-1].keep()
            torch.save(runs[-1].weights, folder / f"{name}.pt")
        for name, policy in policies.items():
            walk = policy.tensors()
            next(walk)
            walk.close()  # by somebody who could not send it: the others have walked to the end
            policy.save(folder / "saved" / name)
            torch.save(policy.prompt_logprobs(TOKENS), folder / f"{name}-logprobs.pt")
            if name == "whole":
                ranks.broadcast(None)  # the others go on to the next policy


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
