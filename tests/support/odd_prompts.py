"""Chat requests with all roles, parts, calls and template variables, and whether an engine renders
them as we do.
"""

from pathlib import Path

import httpx
from envserver_records.errors import TemplateRefused
from envserver_records.tasks import Json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envserver.tokens.chat_format import ChatFormat
from envserver.tokens.prepare import Refused, template_kwargs
from support.extent import examples
from support.templates import tool
from support.waiting import PATIENCE

_PART = st.builds(
    lambda kind, text: {"type": kind, kind: text},
    st.sampled_from(["text", "text", "text", "refusal"]),
    st.sampled_from(["", "", "one", "two\nlines", " "]),
)
_CONTENT = st.sampled_from(["", "What is 2 + 2?"]) | st.lists(_PART, max_size=4)
_ARGUMENTS = ["", "{}", '{"expression": "1"}', "4", "null", "true", '"text"', "[1]", '{"expr']
_CALL = st.sampled_from(_ARGUMENTS).map(
    lambda text: {
        "id": "call00001",
        "type": "function",
        "function": {"name": "calculate", "arguments": text},
    }
)
_ASKED = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user"]), "content": _CONTENT}
)
_ANSWERED = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": _CONTENT | st.none()},
    optional={"tool_calls": st.lists(_CALL, max_size=2), "reasoning": st.just("Two and two.")},
)
_RESULT = st.fixed_dictionaries(
    {"role": st.just("tool"), "tool_call_id": st.just("call00001"), "content": _CONTENT}
)
_BARE = {"type": "function", "function": {"parameters": {"type": "object"}, "name": "look"}}
REQUESTS = st.fixed_dictionaries(
    {"messages": st.lists(_ASKED | _ANSWERED | _RESULT, min_size=1, max_size=5)},
    optional={
        "tools": st.sampled_from([[tool()], [_BARE], [tool(), _BARE]]),
        "tool_choice": st.sampled_from(["auto", "none"]),
        "reasoning_effort": st.sampled_from(["none", "low"]),
        "chat_template_kwargs": st.dictionaries(
            st.just("enable_thinking"), st.sampled_from([None, True, False, "auto"])
        ),
    },
)


def our_text(form: ChatFormat, request: Json) -> str | None:
    """Our rendering of a request; None if we leave it to the engine."""
    try:
        return form.prompt_text(request["messages"], request.get("tools"), template_kwargs(request))
    except (Refused, TemplateRefused):
        return None


def assert_renders_as_we_do(root_url: str, model: str, model_folder: Path) -> None:
    """Sends any requests to an engine: what it renders, we render to the same ids."""
    form = ChatFormat.load(model_folder)
    equal = 0

    @settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
    @given(REQUESTS)
    def compare(request: Json) -> None:
        nonlocal equal
        asked = {"model": model, "max_tokens": 1, **request}
        url = f"{root_url}/v1/chat/completions/render"
        answer = httpx.post(url, json=asked, timeout=PATIENCE)
        ours = our_text(form, request)
        if answer.is_success and ours is not None:
            assert answer.json()["token_ids"] == form.encode(ours)
            equal += 1
        else:
            assert answer.status_code in (200, 400), answer.text

    compare()
    assert equal
