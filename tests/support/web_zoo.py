"""An environment whose agents, behind a wall, look at a web that the server shows them."""

import asyncio
import os
import socket
from typing import Any

from envserver_tools.calling import use_tool
from envserver_tools.web import WebSettings, remote_tools, services_of

from envserver import Environment, InputError, Score, Task

KEY = "tvly-secret-key"
QUESTION = "How many blue herons nested on the northern bank of the river Elbe in spring 1987"


class Looker(Environment):
    isolation = "sandboxed"

    class Config(Environment.Config):
        site: str = ""

    def services(self) -> Any:
        settings = WebSettings(provider_url=self.config.site, allow_private=True)
        return services_of(settings, key=KEY)

    def tasks(self, split):
        yield Task("look", {"question": QUESTION}, {})

    async def rollout(self, task, run):
        await run.chat([{"role": "user", "content": task.public["question"]}])
        tools = remote_tools(run.call_tool)
        site = self.config.site
        search = await use_tool(tools, "web_search", {"query": "herons"})
        page = await use_tool(tools, "visit_page", {"url": f"{site}/page"})
        gone = await use_tool(tools, "visit_page", {"url": f"{site}/none"})
        blocking = await asyncio.to_thread(
            run.call_tool_blocking, "tavily/search", {"query": "herons", "max_results": 5}
        )
        try:
            await run.call_tool("no/such", {})
            refused = ""
        except InputError as error:
            refused = str(error)
        return {
            "search": search.text,
            "page": page.text,
            "gone": [gone.ok, gone.text],
            "results": len(blocking["results"]),
            "refused": refused,
            "reached": self._reaches(site),
            "keys": [name for name, value in os.environ.items() if KEY in value],
        }

    def _reaches(self, site: str) -> bool:
        host, port = site.removeprefix("http://").split(":")
        try:
            socket.create_connection((host, int(port)), timeout=2).close()
        except OSError:
            return False
        return True

    def score(self, task, result):
        seen = result.output
        right = (
            seen["search"].startswith("1. About herons")
            and "# Visit 1" in seen["page"]
            and seen["gone"][0] is False
            and "404" in seen["gone"][1]
            and seen["results"] == 1
            and "no/such" in seen["refused"]
            and not seen["reached"]
            and not seen["keys"]
        )
        return Score(reward=float(right), error=None if right else str(seen))
