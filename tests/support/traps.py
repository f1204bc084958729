"""Chat templates that no rollout should ever meet.

Each breaks a rule that continuing a conversation token by token relies on.
"""

from typing import NamedTuple

from support.cases import cases_of


class Trap(NamedTuple):
    """A template that breaks a rule.

    `tail_is_right`: what it writes behind an answer is as if nothing was wrong; only comparing the
    whole prompt's text with what the template writes now shows that it changes the past.
    """

    source: str
    tail_is_right: bool = False


_PARTS = {
    "%WRITE%": "{{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}",
    "%OPEN%": "{{- '<|im_start|>' + message.role + '\\n' }}",
}


def _trap(
    body: str = "%WRITE%", before: str = "", over: str = "messages", *, tail_is_right: bool = False
) -> Trap:
    """A ChatML template whose loop over `over` has `body`; `text` is the message's content."""
    for name, part in _PARTS.items():
        body = body.replace(name, part)
    source = (
        f"{before}{{%- for message in {over} %}}{{%- set text = message.content or '' %}}"
        f"{body}{{%- endfor %}}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    return Trap(source, tail_is_right)


TRAPS = {name: _trap(**facts) for name, facts in cases_of(__file__).items()}
"""Templates by what they do."""
