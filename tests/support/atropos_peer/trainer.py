"""The loop of atroposlib's example trainer without its model: `python trainer.py URL BATCH STEPS`.

Registers, then asks for data until that many lists of batches were there, all with its own code;
only torch's tensors are NumPy arrays here. Prints one JSON object with what it trained on.
"""

from __future__ import annotations

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

from example_trainer.api import check_atropos_api, register_trainer  # noqa: E402
from example_trainer.data import get_data  # noqa: E402


def main(url: str, batch_size: int, steps: int) -> None:
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
    for _ in range(steps):
        for tokens, labels, advantages, temperatures, logprobs in get_data(batch_size, 2048, url)[
            0
        ]:
            batches += 1
            rows += sum(len(part) for part in tokens)
            assert len(tokens) == len(advantages) == len(temperatures) == 1
            trains = labels[0] != -100
            trained += int(trains.sum())
            assert (tokens[0][:, 1:][trains[:, :-1]] == labels[0][:, :-1][trains[:, :-1]]).all()
            if logprobs is not None:
                assert ((logprobs[0] <= 0) == trains).all()
    sys.stdout.write(json.dumps({"batches": batches, "rows": rows, "trained": trained}) + "\n")


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
