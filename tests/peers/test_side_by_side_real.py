"""What docs/side-by-side.md shows of other frameworks works with their packages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.foreign_trainers import printed

PAGE = (Path(__file__).parents[2] / "docs" / "side-by-side.md").read_text()
CHECKS = {
    ("verifiers", 0): """
import asyncio
env = load_environment()
said = [{"role": "assistant", "content": "It is 4"}]
state = vf.State(prompt=[], completion=said, answer="4", task="", info={}, input={})
async def score():
    return await env.rubric.score_rollout(state)
asyncio.run(score())
assert len(env.get_dataset()) == 2 and state["reward"] == 1.0, state
""",
    ("verifiers", 1): """
import asyncio, types
first, second = Sums(vf.TasksetConfig()).load()
reply = types.SimpleNamespace(last_reply="It is 15")
assert [asyncio.run(task.right(reply)) for task in (first, second)] == [0.0, 1.0]
""",
    ("TRL", 0): """
assert right_of_trl(completions=["It is 4", "It is 4"], answer=["4", "15"]) == [1.0, 0.0]
assert Dataset.from_list(ROWS).rename_column("question", "prompt")[0]["prompt"] == "What is 2+2?"
""",
    ("Atropos", 0): """
config, (engine,) = Sums.config_init()
assert config.group_size == 8 and engine.base_url and not Sums.__abstractmethods__
""",
    ("OpenEnv", 0): """
env = Sums()
assert env.reset(seed=1).question == "What is 3*5?"
assert env.step(Answer(text="It is 15")).reward == 1.0 and app.routes
""",
}
"""By section and number of the block: what must hold after it. NeMo Gym is not on PyPI."""


def blocks(section: str) -> list[str]:
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("section", "number", "peer"),
    [
        ("verifiers", 0, "verifiers_classic_python"),
        ("verifiers", 1, "verifiers_v1_python"),
        ("TRL", 0, "learn_python"),
        ("Atropos", 0, "atropos_python"),
        ("OpenEnv", 0, "openenv_python"),
    ],
)
def test_the_block_does_what_it_says(
    section: str, number: int, peer: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    python: Path = request.getfixturevalue(peer)
    rows = PAGE.partition("```python\n")[2].partition("```")[0]
    block = blocks(section)[number]
    block = block.partition("\nif __name__")[0].partition("\ntrainer = ")[0]  # needs a model
    printed(python, "-W", "ignore", "-c", rows + block + CHECKS[section, number], folder=tmp_path)
