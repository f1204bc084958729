"""The rollouts of `compare.py` by verifiers 0.4, in its own interpreter.

python compare_verifiers_v1.py URL ROLLOUTS TURNS AT_A_TIME MORE RESULTS_FOLDER

Prints how many rollouts ended with token ids and logprobs for each turn. `run_eval` plays them in
this process, with the client for training. Its own chat loop is a program started for each turn:
the harness here makes the same call without one.
"""

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Call", "Talk", "TalkEnv"]

TOKENIZER = Path(__file__).with_name("compare_tokenizer")
"""The engine's: an id is a byte of the text, 256 the end of a message, 257 its start; the others
are what a renderer for Qwen3 needs.
"""


class TalkTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def answered(self, trace):
        return float(bool(trace.last_reply))


class TalkConfig(vf.TasksetConfig):
    count: int = 0


class Talk(vf.Taskset[TalkTask, TalkConfig]):
    def load(self):
        for number in range(self.config.count):
            yield TalkTask(vf.TaskData(prompt=f"Question {number}: say hello."), self.config.task)


class Call(vf.Harness[vf.HarnessConfig]):
    """Makes one call for each turn, in this process."""

    SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False
    http: aiohttp.ClientSession

    async def setup(self, runtime):
        """Prepares nothing."""

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": [message_to_wire(message) for message in prompt]}
        headers = {"Authorization": f"Bearer {secret}"}
        url = f"{endpoint}/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as answer:
            text = await answer.text()
        return ProgramResult(exit_code=int(answer.status != 200), stdout="", stderr=text)


class TalkEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    turns: int = 1
    more: int = 0


class TalkEnv(vf.Env[TalkEnvConfig]):
    async def start(self):
        Call.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def stop(self):
        await Call.http.close()

    async def run(self, task, agents):
        async with agents.agent.interaction(task.with_data(prompt=None)) as talk:
            for turn in range(self.config.turns):
                go_on = "Go on." + self.config.more * " more"
                await talk.turn(go_on if turn else task.data.prompt)


def is_whole(episode, turns: int) -> bool:
    sampled = [node for trace in episode.traces for node in trace.nodes if node.sampled]
    has_tokens = all(node.logprobs and len(node.logprobs) == sum(node.mask) for node in sampled)
    return episode.ok and len(sampled) == turns and has_tokens


async def main() -> None:
    url, rollouts, turns, at_a_time, more = sys.argv[1], *map(int, sys.argv[2:6])
    name = Path(__file__).stem
    client = {
        "type": "train",
        "base_url": f"{url}/v1",
        "api_key_var": "COMPARE_KEY",
        "renderer_model_name": str(TOKENIZER),
        # Continues a prompt with the tokens sampled before.
        "renderer": {"name": "qwen3", "thinking_retention": "all"},
    }
    config = EvalConfig.model_validate(
        {
            "env": {"taskset": {"id": name, "count": rollouts}, "turns": turns, "more": more},
            "client": client,
            "model": "m",
            "max_concurrent": at_a_time,
            "rich": None,
            "push": False,
            "output_dir": Path(sys.argv[6]),
            "run": {"dir": "run"},
        }
    )
    print("whole", sum(is_whole(episode, turns) for episode in await run_eval(config)))


if __name__ == "__main__":
    os.environ |= {"COMPARE_KEY": "none", "HF_HUB_OFFLINE": "1"}
    asyncio.run(main())
