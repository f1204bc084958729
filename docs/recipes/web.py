"""The web: search and pages, looked at by the server and recorded, so that a run can be repeated.

    envserver process --env docs/recipes/web.py --model sim                     # records
    envserver process --env docs/recipes/web.py --model sim --env.web replay    # needs no network

The agent's process has no network; `isolation = "sandboxed"` would close it in entirely. A page
that cannot be reached is an observation; a search engine that fails is a failure of ours.
"""

import json

from envserver_tools.web import WebSettings, remote_tools, services_of

from envserver import Environment, KnownResult, Result, Score, Task


class Browse(Environment):
    """Find a fact on a page of a site."""

    class Config(Environment.Config):
        web: str = "record"
        """live, record, replay or off."""
        site: str = "https://example.com"
        """The site to look at."""
        folder: str = "data/web"
        """Where the pages are recorded."""
        local: bool = False
        """Allow a site of this machine."""

    def services(self):
        settings = WebSettings(
            mode=self.config.web,
            folder=self.config.folder,
            provider="duckduckgo",  # needs no key
            allow_private=self.config.local,
        )
        return services_of(settings)

    def tasks(self, split):
        asked = f"For use in what is the domain of {self.config.site} meant? One word."
        yield Task("domain", {"question": asked}, {"answer": "documentation"})

    async def rollout(self, task, run):
        tools = list(remote_tools(run.call_tool).values())
        end = await run.loop([{"role": "user", "content": task.public["question"]}], tools=tools)
        return end.text

    def score(self, task, result):
        words = (result.output or "").lower().rstrip(". ").split()
        return Score(reward=float(words[-1:] == [task.hidden["answer"]]))

    def demonstration(self, task):
        function = {"name": "visit_page", "arguments": json.dumps({"url": self.config.site})}
        calls = [{"id": "call-1", "type": "function", "function": function}]
        first = {"role": "assistant", "content": "", "tool_calls": calls}
        return [first, {"role": "assistant", "content": f"In {task.hidden['answer']}."}]

    def known_results(self, task):
        yield KnownResult("a guess", Result(output="In songs."))
