"""An environment on atroposlib's BaseEnv: `python environments.py serve ...`.

It samples token by token through its ManagedServer, from a server that offers `/generate`.
"""

from __future__ import annotations

from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class Managed(BaseEnv):
    """Groups with the logprobs of the sampled tokens, as example_trainer needs them."""

    name = "managed"

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
    Managed.cli()
