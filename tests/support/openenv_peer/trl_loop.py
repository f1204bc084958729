"""TRL's own OpenEnv loop before a server of ours: `trl_loop.py PACKAGES URL MODEL OUTPUT`.

Runs in .venv-learn, with what only openenv needs from PACKAGES (its site-packages). TRL generates,
and calls the methods of `Desk` as tools; each is a step of an episode at our server, which gives
the reward.
"""

import site
import sys
from pathlib import Path

packages, url, model, output = sys.argv[1:]
site.addsitedir(packages)  # behind this interpreter's own

# ruff: noqa: E402
import torch
import trl
from datasets import Dataset
from openenv import GenericEnvClient
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


class Desk:
    """One seat: an episode at a time."""

    def __init__(self):
        self._env = GenericEnvClient(base_url=url).sync()
        self._last = None

    def reset(self, seed, **columns):
        self._last = self._env.reset(seed=seed)
        return self._last.observation["text"]

    def calculate(self, expression: str) -> str:
        """Evaluates an expression.

        Args:
            expression: an arithmetic expression.
        """
        return self._call("calculate", expression=expression)

    def finish(self, answer: str) -> str:
        """Gives the answer.

        Args:
            answer: the final answer.
        """
        return self._call("finish", answer=answer)

    def get_reward(self) -> float:
        if not self._last.done:  # the model has ended its turn without `finish`
            self._last = self._env.step({"message": ""})
        print("EPISODE", self._last.done, self._last.reward, flush=True)
        return self._last.reward

    def _call(self, name, **arguments):
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        self._last = self._env.step(action)
        return self._last.observation["result"]


seat = Desk()  # a right answer is paid; the tiny model below finds none
seat.reset(seed=0)
assert "2" in seat.calculate("1+1")

torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(model)
# TRL reads calls of templates that it knows.
template = Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja"
tokenizer.chat_template = template.read_text()
GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    args=GRPOConfig(
        output_dir=output,
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        save_strategy="no",
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=1,
    ),
    train_dataset=Dataset.from_list(
        [{"prompt": [{"role": "user", "content": ""}], "seed": seed} for seed in range(8)]
    ),
    environment_factory=Desk,
).train()
