"""The rollouts of `compare.py` by verifiers 0.3.1, in its own interpreter.

python compare_verifiers.py URL ROLLOUTS TURNS AT_A_TIME MORE RESULTS_FOLDER

Prints how many rollouts ended with token ids for each turn. Everything runs in this process, as
`vf.Environment.generate` does it.
"""

import asyncio
import os
import sys
from pathlib import Path

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig

URL, ROLLOUTS, TURNS, AT_A_TIME, MORE = sys.argv[1], *map(int, sys.argv[2:6])


class Talk(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="Go on." + MORE * " more")]


def answered(completion):
    return float(bool(completion))


def is_whole(output) -> bool:
    steps = output.get("trajectory") or []
    tokens = [step.get("tokens") or {} for step in steps]
    return len(steps) == TURNS and all(one.get("completion_ids") for one in tokens)


async def main() -> None:
    os.environ["COMPARE_KEY"] = "none"
    questions = [f"Question {number}: say hello." for number in range(ROLLOUTS)]
    rows = [{"question": question, "answer": ""} for question in questions]
    env = Talk(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[answered]), max_turns=TURNS)
    outputs = await env.generate(
        env.get_dataset(ROLLOUTS),
        client=ClientConfig(api_key_var="COMPARE_KEY", api_base_url=URL + "/v1", max_retries=0),
        model="m",
        sampling_args={"logprobs": True, "extra_body": {"return_token_ids": True}},
        max_concurrent=AT_A_TIME,
        state_columns=["trajectory"],
        results_path=Path(sys.argv[6]),
        save_results=True,
        on_progress=lambda *a: None,
    )
    print("whole", sum(map(is_whole, outputs["outputs"])))


asyncio.run(main())
