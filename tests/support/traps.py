"""Chat templates that no rollout should ever meet.

Each breaks a rule that continuing a conversation token by token relies on.
"""

from typing import NamedTuple


class Trap(NamedTuple):
    """A template that breaks a rule.

    `tail_is_right`: what it writes behind an answer is as if nothing was wrong; only comparing the
    whole prompt's text with what the template writes now shows that it changes the past.
    """

    source: str
    tail_is_right: bool = False


def _trap(
    body: str, before: str = "", over: str = "messages", *, tail_is_right: bool = False
) -> Trap:
    """A ChatML template whose loop over `over` has `body`; `text` is the message's content."""
    source = (
        f"{before}{{%- for message in {over} %}}{{%- set text = message.content or '' %}}"
        f"{body}{{%- endfor %}}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    return Trap(source, tail_is_right)


_WRITE = "{{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}"
_OPEN = "{{- '<|im_start|>' + message.role + '\\n' }}"
_SYSTEM_OF = "messages | selectattr('role', 'equalto', 'system') | list"
_OTHERS_OF = "messages | rejectattr('role', 'equalto', 'system') | list"

TRAPS = {
    "keeps_the_last_two": _trap(_WRITE, over="messages[-2:]", tail_is_right=True),
    "system_message_last": _trap(_WRITE, over=f"({_OTHERS_OF}) + ({_SYSTEM_OF})"),
    "repeats_the_last": _trap(_WRITE + "{%- if loop.last %}" + _WRITE + "{%- endif %}"),
    "drops_tool_results": _trap("{%- if message.role != 'tool' %}" + _WRITE + "{%- endif %}"),
    "numbers_from_the_end": _trap(
        "{%- set text = '[' ~ loop.revindex ~ '] ' ~ text %}" + _WRITE, tail_is_right=True
    ),
    "total_in_front": _trap(
        _WRITE, before="{{- messages | length ~ ' messages\\n' }}", tail_is_right=True
    ),
    "marks_the_past_in_front": _trap(
        "{%- if not loop.last %}{{- '(past)' }}{%- endif %}" + _WRITE, tail_is_right=True
    ),
    "marks_the_last_behind": _trap(
        "{%- set text = text ~ ('' if loop.last else ' (past)') %}" + _WRITE
    ),
    "ends_the_last_otherwise": _trap(
        _OPEN + "{{- text }}"
        "{{- '<|endoftext|>' if loop.last and not add_generation_prompt else '<|im_end|>' }}"
    ),
    "upper_case": _trap("{%- set text = text | upper %}" + _WRITE),
    "lower_case": _trap("{%- set text = text | lower %}" + _WRITE),
    "trims": _trap("{%- set text = text | trim %}" + _WRITE),
    "cuts_short": _trap("{%- set text = text[:9] %}" + _WRITE),
    "backwards": _trap("{%- set text = text | reverse %}" + _WRITE),
    "newest_first": _trap(_WRITE, over="messages | reverse"),
    "sorts_by_content": _trap(_WRITE, over="messages | sort(attribute='content')"),
    "sorts_by_role": _trap(_WRITE, over="messages | sort(attribute='role')"),
    "time_in_front": _trap(
        _WRITE, before="{{- strftime_now('%H:%M:%S.%f') ~ '\\n' }}", tail_is_right=True
    ),
    "chance_behind": _trap(_WRITE + "{{- range(99999) | random ~ '\\n' }}", tail_is_right=True),
    "merges_roles": _trap(
        "{%- if loop.first or message.role != messages[loop.index0 - 1].role %}"
        + _OPEN
        + "{%- endif %}{{- text ~ '\\n' }}"
        "{%- if loop.last or message.role != messages[loop.index0 + 1].role %}"
        "{{- '<|im_end|>\\n' }}{%- endif %}"
    ),
    "recalls_the_answer": _trap(
        "{%- if not loop.first and messages[loop.index0 - 1].role == 'assistant' %}"
        "{%- set text = 'You said: ' ~ messages[loop.index0 - 1].content ~ '\\n' ~ text %}"
        "{%- endif %}" + _WRITE
    ),
    "last_result_only": _trap(
        "{%- set after = messages[loop.index0 + 1] | default({}) %}"
        "{%- if message.role != 'tool' or after.role != 'tool' %}" + _WRITE + "{%- endif %}"
    ),
    "results_backwards": _trap(
        "{%- if message.role != 'tool' %}" + _WRITE + "{%- endif %}"
        "{%- if loop.last %}"
        "{%- for message in messages | selectattr('role', 'equalto', 'tool') | reverse %}"
        "{%- set text = message.content %}" + _WRITE + "{%- endfor %}{%- endif %}"
    ),
    "prints_objects": _trap("{{- message | tojson ~ '<|im_end|>\\n' }}"),
    "counts_letters": _trap("{%- set text = text | length ~ ' letters' %}" + _WRITE),
    "ends_between_only": _trap(
        _OPEN + "{{- text }}{%- if not loop.last %}{{- '<|im_end|>\\n' }}{%- endif %}",
        tail_is_right=True,
    ),
}
"""Templates by what they do."""
