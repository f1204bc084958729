"""Environments on atroposlib's BaseEnv: `python environments.py whole|parts|managed serve ...`.

`whole` makes one group at a time through the default `collect_trajectories`; `parts` makes a list
of two half groups, which the server has to put together; both sample from an OpenAI-compatible
server. `managed` samples token by token through its ManagedServer, from a server that offers
`/generate`.
"""

from __future__ import annotations

import sys
from typing import Any

from atroposlib.envs.base import (
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    ScoredDataGroup,
    ScoredDataItem,
)

NOT_TRAINED = -100


class Whole(BaseEnv):
    """Asks for a sum; the score alternates."""

    name = "whole"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = BaseEnvConfig(wandb_name=cls.name, use_wandb=False, group_size=4)
        server = APIServerConfig(model_name="sim", base_url="http://localhost:1/v1", api_key="x")
        return config, [server]

    async def setup(self) -> None:
        self.count = 0

    async def get_next_item(self) -> tuple[int]:
        self.count += 1
        return (self.count,)

    async def evaluate(self, *_: Any, **__: Any) -> None:
        return None

    async def row(self, number: int, score: float) -> ScoredDataItem:
        messages = [{"role": "user", "content": f"{number} + {number}?"}]
        answer = await self.server.chat_completion(messages=messages, max_tokens=32)
        said = {"role": "assistant", "content": answer.choices[0].message.content or ""}
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        tokens = list(prompt) + self.tokenizer.encode(said["content"] + "<|im_end|>")
        masks = [NOT_TRAINED] * len(prompt) + tokens[len(prompt) :]
        return ScoredDataItem(tokens=tokens, masks=masks, scores=score, messages=[*messages, said])

    async def collect_trajectory(self, item: tuple[int]) -> tuple[ScoredDataItem, list[Any]]:
        self.made = getattr(self, "made", 0) + 1
        return await self.row(item[0], float(self.made % 2)), []


class Parts(Whole):
    """Each item gives two half groups."""

    name = "parts"

    async def collect_trajectories(self, item: tuple[int]) -> tuple[list[Any], list[Any]]:
        return [await self.half(item[0]), await self.half(item[0])], []

    async def half(self, number: int) -> ScoredDataGroup:
        size = self.config.group_size // 2
        rows = [await self.row(number, float(index)) for index in range(size)]
        return ScoredDataGroup(
            tokens=[row["tokens"] for row in rows],
            masks=[row["masks"] for row in rows],
            scores=[row["scores"] for row in rows],
            messages=[row["messages"] for row in rows],
            group_overrides={"group_size": size},
        )


class Managed(Whole):
    """Groups with the logprobs of the sampled tokens, as example_trainer needs them."""

    name = "managed"

    async def collect_trajectories(self, item: tuple[int]) -> tuple[ScoredDataGroup, list[Any]]:
        messages = [{"role": "user", "content": f"{item[0]} + {item[0]}?"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=messages, n=self.config.group_size, max_tokens=32, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]
        return ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            scores=[float(index % 2) for index in range(len(nodes))],
            inference_logprobs=[node.logprobs for node in nodes],
        ), []


if __name__ == "__main__":
    {"whole": Whole, "parts": Parts, "managed": Managed}[sys.argv.pop(1)].cli()
