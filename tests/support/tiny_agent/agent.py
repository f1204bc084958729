"""A whole agent in thirty lines: runs the bash blocks that the model writes, until there is none.

python3 agent.py INSTRUCTION_FILE
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

instruction = Path(sys.argv[1]).read_text()
messages = [{"role": "user", "content": instruction}]


def asked():
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


if "silently" in instruction:
    sys.exit(f"there is no {os.environ['OPENAI_API_KEY']}")
if "slowly" in instruction:
    asked()
    subprocess.Popen(["sleep", "1234"], start_new_session=True)
    time.sleep(1234)
while True:
    text = asked()
    print(text)
    block = re.search(r"```bash\n(.*?)```", text, re.DOTALL)
    if block is None:
        sys.exit(7)  # a status that says nothing
    done = subprocess.run(["bash", "-c", block[1]], capture_output=True, text=True)
    if "COMPLETE_TASK" in done.stdout:
        break
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"status {done.returncode}\n{done.stdout}{done.stderr}"},
    ]
