"""The environment `gaia` whose web is that of `websites`, for test_gaia_runs.py.

A row's question is `<agent> <number>`; each agent of it looks at the same web in its own way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from envserver_environments.gaia.env import Gaia
from envserver_tools.web import WebSettings, services_of

from envserver import Message, PublicTask, Rollout, Service, Task

KEY = "tvly-secret-key"


class Reader(Gaia):
    class Config(Gaia.Config):
        site: str = ""
        asks_more: bool = False
        """Looks for something that the first run did not look for."""

    def services(self) -> AbstractAsyncContextManager[Mapping[str, Service]]:
        config = self.config
        assert config.web != "none"
        settings = WebSettings(
            mode=config.web,
            folder=config.web_folder,
            provider_url=config.site,
            allow_private=True,
        )
        return services_of(settings, key=KEY)

    async def rollout(self, task: PublicTask, run: Rollout) -> dict[str, Any]:
        agent = task.public["question"].split()[0]
        self.config = self.config.model_copy(update={"agent": agent})
        return await super().rollout(task, run)

    def demonstration(self, task: Task) -> list[Message]:
        agent, number = task.public["question"].split()
        page = f"{self.config.site}/page"
        asked: list[tuple[str, dict[str, Any]]] = [
            ("web_search", {"query": f"herons {number}"}),
            ("visit_page", {"url": page, "limit": 500}),
            ("find_in_page", {"url": page, "text": "Visit"}),
            ("visit_page", {"url": f"{self.config.site}/none"}),
        ]
        if self.config.asks_more:
            asked.append(("web_search", {"query": f"never asked {number}"}))
        return [
            *(_turn(agent, *one) for one in asked),
            _turn(agent, "final_answer", {"answer": "42"}),
        ]


def _turn(agent: str, name: str, arguments: dict[str, Any]) -> Message:
    if agent == "code":
        values = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        call = f"{name}({values})"
        return {"role": "assistant", "content": f"Now.\n<code>\n{call}\n</code>"}
    function = {"name": name, "arguments": json.dumps(arguments)}
    call_of = {"id": "c", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call_of]}
