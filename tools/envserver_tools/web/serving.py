"""The web as services of an environment: the server looks at it for agents that have no network.

    def services(self):
        return services_of(WebSettings(mode=self.config.web_mode, folder=...))

`web_search`, `visit_page` and `find_in_page` answer `{"text", "ok"}`, as `call_tool` does;
`tavily/search` and `tavily/extract` answer as Tavily's own API, whatever the provider: for its
client, `TavilyClient(run.api_key, api_base_url=f"{run.tools_url}/tavily")`.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from envserver_records.tasks import Json

from envserver import Caller, ConfigError, InputError, Service, ServiceError, Services, Task

from ..calling import Tool, ToolError, use_tool
from .fetching import ProviderFailed, answer_like_tavily
from .web import DESCRIPTIONS, MOST_RESULTS, Viewer, Web, WebSettings, web_tools

KEY_VARIABLE = "TAVILY_API_KEY"
_MOST_URLS = 20

Asking = Callable[[str, Json], Awaitable[Any]]
"""`run.call_tool`."""


def question_of(task: Task) -> str:
    return str(task.public.get("question", ""))


@asynccontextmanager
async def services_of(
    settings: WebSettings,
    *,
    key: str | None = None,
    question: Callable[[Task], str] = question_of,
) -> AsyncIterator[Services]:
    """Returns services for `Environment.services`.

    `key`: unset: the server's variable TAVILY_API_KEY. Never a setting of the environment: settings
    are sent to the agents' processes. `question`: no text shown may repeat it.
    """
    try:
        web = Web(settings, key=os.environ.get(KEY_VARIABLE, "") if key is None else key)
    except ValueError as error:
        raise ConfigError(f"The web cannot be offered: {error}.") from error

    def viewer(caller: Caller) -> Viewer:
        return Viewer(caller.group_id, question(caller.task), caller.flag, caller.rollout_id)

    async with web:
        services = {
            **{name: _tool(web, viewer, name) for name in web_tools(web)},
            "tavily/search": _like_search(web, viewer),
            "tavily/extract": _like_extract(web, viewer),
        }
        yield Services(
            services,
            counts=lambda: {f"web_{name}": n for name, n in web.metrics.as_dict().items()},
            shown=lambda group_id: {"web": web.shown(group_id)},
        )


def remote_tools(ask: Asking) -> dict[str, Tool]:
    """Returns the web tools of an agent without network access: `remote_tools(run.call_tool)`."""
    return {
        str(description["function"]["name"]): _remote(ask, description)
        for description in DESCRIPTIONS
    }


def _remote(ask: Asking, description: Json) -> Tool:
    name = str(description["function"]["name"])

    async def call(**arguments: Any) -> str:
        answer = await ask(name, arguments)
        if not answer["ok"]:
            raise ToolError(str(answer["text"]).removeprefix("Error: "))
        return str(answer["text"])

    return Tool(description, call, max_characters=50_000)


def _tool(web: Web, viewer: Callable[[Caller], Viewer], name: str) -> Service:
    async def call(arguments: Json, caller: Caller) -> Json:
        with _judged():
            result = await use_tool(web_tools(web, viewer(caller)), name, arguments)
        return {"text": result.text, "ok": result.ok}

    return call


@contextmanager
def _judged() -> Iterator[None]:
    """Turns the errors of the web into those of a service: the agent's fault, or the provider's."""
    try:
        yield
    except ToolError as error:
        raise InputError(str(error)) from error
    except ProviderFailed as error:
        raise ServiceError(str(error)) from error


def _like_search(web: Web, viewer: Callable[[Caller], Viewer]) -> Service:
    async def search(arguments: Json, caller: Caller) -> Json:
        query, most = arguments.get("query"), arguments.get("max_results", 5)
        if not isinstance(query, str) or type(most) is not int or not 0 < most <= MOST_RESULTS:
            raise InputError(f"A search needs a query, and 1 to {MOST_RESULTS} max_results.")
        options = {name: value for name, value in arguments.items() if value is not None}
        looks = viewer(caller)
        with _judged():
            hits = await web.hits(query, most, options, looks)
        return json_safe(answer_like_tavily(query, hits))

    return search


def _like_extract(web: Web, viewer: Callable[[Caller], Viewer]) -> Service:
    async def extract(arguments: Json, caller: Caller) -> Json:
        urls = arguments.get("urls")
        urls = [urls] if isinstance(urls, str) else urls
        if (
            not isinstance(urls, list)
            or not 0 < len(urls) <= _MOST_URLS
            or not all(isinstance(url, str) for url in urls)
        ):
            raise InputError(f"An extraction needs 1 to {_MOST_URLS} urls.")
        looks = viewer(caller)
        results, failed = [], []
        for url in urls:
            try:
                with _judged():
                    _, text = await web.page(url, looks)
                    web.showing(text.text, looks)
            except InputError as error:
                failed.append({"url": url, "error": error.message})
            else:
                results.append({"url": url, "raw_content": text.text, "images": []})
        answer = {"results": results, "failed_results": failed, "response_time": 0.0}
        return json_safe(answer)

    return extract


def json_safe(answer: Json) -> Json:
    """`answer` without the halves of characters that JSON cannot hold."""
    whole = json.dumps(answer, ensure_ascii=False).encode(errors="replace")
    safe: Json = json.loads(whole)
    return safe
