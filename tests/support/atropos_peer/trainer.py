"""The loop of atroposlib's example trainer without its model: `python trainer.py URL BATCH STEPS`.

Registers, then asks for data until that many lists of batches were there, all with its own code;
only torch's tensors are NumPy arrays here. Prints one JSON object with what it trained on; with
`--groups` behind the others also the groups as they came.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
import types
from typing import Any

import numpy as np


class Tensor(np.ndarray[Any, Any]):
    """What the trainer's data code does with a tensor."""

    def view(self, *shape: Any) -> Any:
        return self.reshape(shape)


def stand_in(name: str, **contents: Any) -> None:
    """Puts a module of that name before anyone imports the real one."""
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


# The package itself imports the model; only its two modules that speak to the server are wanted.
package = importlib.util.find_spec("example_trainer")
assert package is not None
stand_in("example_trainer", __path__=package.submodule_search_locations)
stand_in("example_trainer.config", TrainingConfig=types.SimpleNamespace)
stand_in("torch", Tensor=Tensor, tensor=lambda values: np.asarray(values).view(Tensor))

from example_trainer import data  # noqa: E402
from example_trainer.api import check_atropos_api, register_trainer  # noqa: E402

MOST = 4
"""Batches of a step: its code goes on until there is none, which a faster server never says."""
arrived: list[Any] = []
_get_batch = data.get_batch
_in_a_row = 0


def listening(**options: Any) -> Any:
    """Its own function for a batch, which is kept; none after `MOST` in a row."""
    global _in_a_row
    if _in_a_row == MOST:
        _in_a_row = 0
        return {"batch": None}
    answer = _get_batch(**options)
    _in_a_row = _in_a_row + 1 if answer["batch"] else 0
    arrived.extend(copy.deepcopy(answer["batch"] or []))  # it scales the scores in place
    return answer


data.get_batch = listening


def main(url: str, batch_size: int, steps: int, groups: bool) -> None:
    """Trains on nothing, `steps` times."""
    config = types.SimpleNamespace(
        atropos_url=url,
        training_steps=steps,
        checkpoint_interval=0,
        wandb_group=None,
        wandb_project=None,
        batch_size=batch_size,
        gradient_accumulation_steps=1,
        seq_len=2048,
        save_path="checkpoints",
    )
    assert check_atropos_api(url)
    register_trainer(config)
    batches = rows = trained = 0
    learned: list[float] = []
    for _ in range(steps):
        for columns in data.get_data(batch_size, 2048, url)[0]:
            # A trajectory with several rows makes more than one tensor of `batch_size` rows.
            for tokens, labels, advantages, _, logprobs in zip(*columns, strict=True):
                batches += 1
                rows += len(tokens)
                assert len(labels) == len(advantages) == len(tokens)
                trains = labels != -100
                trained += int(trains.sum())
                learned += np.asarray(advantages).ravel().tolist()
                assert (tokens[:, 1:][trains[:, :-1]] == labels[:, :-1][trains[:, :-1]]).all()
                assert ((logprobs <= 0) == trains).all()
    told: dict[str, Any] = {"batches": batches, "rows": rows, "trained": trained}
    told["spread"] = float(np.std(learned))
    if groups:
        told["groups"] = arrived
    sys.stdout.write(json.dumps(told) + "\n")


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "--groups" in sys.argv)
