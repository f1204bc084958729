"""Environments for programs of others: the simulated engine calls their shell.

`--env.shell NAME:ARGUMENT` names the tool, such as `Bash:command`.
"""

import json
import re
from pathlib import Path
from typing import Any

from envserver_environments.code.env import Code
from envserver_environments.gaia.env import Gaia
from envserver_environments.mhqa.env import Mhqa
from envserver_environments.scenarios.env import Scenarios
from envserver_environments.swe.agent import SUBMIT
from envserver_environments.swe.env import Swe
from envserver_integrations.harbor.env import Harbor
from envserver_records.tasks import Json

from envserver import EnvironmentConfig

_BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)


def calls(commands: list[str], config: Any, last: str) -> list[Json]:
    """Returns assistant messages that run commands, one a turn, and then say `last`."""
    name, _, argument = config.shell.partition(":")
    if name == "code":  # smolagents
        codes = [f"print(bash({command!r}))" for command in commands]
        codes.append(f"final_answer({last!r})")
        texts = [f"Thought: It is next.\n<code>\n{code}\n</code>" for code in codes]
        return [{"role": "assistant", "content": text} for text in texts]
    ends = config.ends_by_command
    if ends:
        commands = [*commands, f"echo {SUBMIT}"]
    messages: list[Json] = []
    for command in commands:
        words = {argument: command}
        if name in ("Bash", "bash"):
            words["description"] = "Does it"
        function = {"name": name, "arguments": json.dumps(words)}
        call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    if ends:
        messages[-1]["content"] = last
        return messages
    return [*messages, {"role": "assistant", "content": last}]


class Shell(EnvironmentConfig):
    shell: str = "Bash:command"
    ends_by_command: bool = False


class Repairs(Swe):
    exact_demonstrations = True

    class Config(Swe.Config, Shell):
        pass

    def demonstration(self, task):
        texts = [str(one["content"]).replace(SUBMIT, "ok") for one in super().demonstration(task)]
        commands = [block for text in texts for block in _BLOCK.findall(text)]
        return calls(["ls", "git log --oneline", "pwd", *commands], self.config, "Repaired.")


class Programs(Code):
    exact_demonstrations = True

    class Config(Code.Config, Shell):
        max_turns: int = 20

    def demonstration(self, task):
        written = f"cat > solution.py <<'EOF'\n{task.hidden['code']}\nEOF"
        commands = ["ls", "pwd", written, "python3 -m py_compile solution.py", "cat solution.py"]
        return calls(commands, self.config, "Written.")


class Questions(Mhqa):
    exact_demonstrations = True

    class Config(Mhqa.Config, Shell):
        shell: str = "mcp__env__search:query"

    def demonstration(self, task):
        queries = [task.public["question"]] * 4
        return calls(queries, self.config, f"Answer: {task.hidden['golds'][0]}")


class Errands(Scenarios):
    exact_demonstrations = True

    class Config(Scenarios.Config, Shell):
        commands: list[str] = []

    def demonstration(self, task):
        return calls(self.config.commands, self.config, "Done.")


class Assistance(Gaia):
    exact_demonstrations = True

    class Config(Gaia.Config, Shell):
        pass

    def demonstration(self, task):
        worked = f"python3 - <<'EOF'\n{task.hidden['solution']}\nprint(answer)\nEOF"
        commands = ["ls", "pwd", "wc -c attachment*", worked]
        return calls(commands, self.config, f"FINAL ANSWER: {task.hidden['answer']}")


class Folders(Harbor):
    exact_demonstrations = True

    class Config(Harbor.Config, Shell):
        tasks_folder: Path = Path()

    def __init__(self, config=None):
        super().__init__(config)
        self.folder = self.config.tasks_folder

    def demonstration(self, task):
        return calls(["ls", "pwd", "id", task.hidden["solution"], "ls"], self.config, "It is done.")
