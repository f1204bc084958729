"""Environments of the kinds that Atropos collects: `python kinds.py single|turns|tools serve ...`.

`single`: one answer, judged. `turns`: a game of several turns. `tools`: calls of a tool in tags,
and their results. Each makes two groups, always the same with an engine that answers the same to
the same request.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from atroposlib.utils.tool_call_parser import parse_tool_call

ITEMS = 2
TURNS = 3
TOOL: dict[str, Any] = {"name": "add", "parameters": {"a": "integer", "b": "integer"}}
LOGPROB = -0.5
"""Said of every sampled token: the engine is scripted."""

Messages = list[dict[str, str]]


class Kind(BaseEnv):
    """Plays an item once for each member of a group; `play` returns a conversation and a score."""

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = BaseEnvConfig(
            wandb_name=cls.name, use_wandb=False, group_size=4, ensure_scores_are_not_same=False
        )
        server = APIServerConfig(model_name="x", base_url="http://localhost:1/v1", api_key="x")
        return config, [server]

    async def setup(self) -> None:
        self.count = 0

    async def get_next_item(self) -> int | None:
        self.count += 1
        return self.count if self.count <= ITEMS else None

    async def evaluate(self, *_: Any, **__: Any) -> None:
        return None

    async def collect_trajectories(self, item: int) -> tuple[ScoredDataGroup, list[Any]]:
        members = range(self.config.group_size)
        played = await asyncio.gather(*(self.play(item, member) for member in members))
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], messages=[], inference_logprobs=[])
        for messages, score in played:
            made = tokenize_for_trainer(self.tokenizer, messages, train_on_all_assistant_turns=True)
            group["tokens"].append(made["tokens"])
            group["masks"].append(made["masks"])
            logprobs = [1.0 if mask == -100 else LOGPROB for mask in made["masks"]]
            group["inference_logprobs"].append(logprobs)
            group["messages"].append(messages)
            group["scores"].append(score)
        return group, []

    async def ask(self, messages: Messages, member: int) -> str:
        """Appends the model's answer to the conversation."""
        completion = await self.server.chat_completion(
            messages=messages, n=1, max_tokens=64, seed=member
        )
        said = completion.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        return said

    async def play(self, item: int, member: int) -> tuple[Messages, float]:
        raise NotImplementedError


class Single(Kind):
    name = "single"

    async def play(self, item: int, member: int) -> tuple[Messages, float]:
        messages = [{"role": "user", "content": f"Guess the digit of riddle {item}."}]
        said = await self.ask(messages, member)
        return messages, 1.0 if str(item) in said else -1.0


class Turns(Kind):
    name = "turns"

    async def play(self, item: int, member: int) -> tuple[Messages, float]:
        messages = [
            {"role": "system", "content": "You guess digits."},
            {"role": "user", "content": f"Game {item}. Guess."},
        ]
        for turn in range(TURNS):
            if str(item) in await self.ask(messages, member):
                return messages, 1.0 - turn / TURNS
            messages.append({"role": "user", "content": "No. Guess again."})
        return messages[:-1], -1.0


class Tools(Kind):
    name = "tools"

    async def play(self, item: int, member: int) -> tuple[Messages, float]:
        messages = [
            {"role": "system", "content": f"<tools>{TOOL}</tools>"},
            {"role": "user", "content": f"What is {item} + 40?"},
        ]
        called, arguments, wrong = parse_tool_call(await self.ask(messages, member), [TOOL])
        if wrong or called != TOOL["name"]:
            return messages, -1.0
        result = arguments["a"] + arguments["b"]
        messages.append({"role": "user", "content": f"<tool_response>{result}</tool_response>"})
        said = await self.ask(messages, member)
        return messages, 1.0 if str(item + 40) in said else 0.0


if __name__ == "__main__":
    {"single": Single, "turns": Turns, "tools": Tools}[sys.argv.pop(1)].cli()
