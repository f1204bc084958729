"""mini-swe-agent (PyPI): its own configuration and loop, in its own virtual environment.

Its model is asked once for each step: by itself it asks ten times, with pauses of up to a minute.
"""

from __future__ import annotations

import json

from .launch import WORDS_FILE, Harness, Launch, Package, Session

_PROGRAM = """\
import json, sys
from pathlib import Path

import yaml
from minisweagent.agents.default import AgentConfig, DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

about = json.loads(Path(sys.argv[1]).read_text())
config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
model = config.get("model") or {}
model["model_kwargs"] = {**(model.get("model_kwargs") or {}), **about["model_kwargs"]}
model |= {"model_name": about["model"], "cost_tracking": "ignore_errors"}
environment = (config.get("environment") or {}) | {"cwd": about["workspace"]}
environment.pop("environment_class", None)
agent = {
    key: value for key, value in (config.get("agent") or {}).items()
    if key in AgentConfig.model_fields
}
agent |= {"step_limit": 0, "cost_limit": 0}
done = DefaultAgent(LitellmModel(**model), LocalEnvironment(**environment), **agent).run(
    about["instruction"]
)
print(json.dumps(done, default=str))
Path(about["words_file"]).write_text(done.get("submission") or "")
"""


def _launch(session: Session) -> Launch:
    about = {
        "model": f"openai/{session.model}",
        "model_kwargs": {
            "api_base": session.base_url,
            "api_key": session.api_key,
            "num_retries": 0,
            "max_retries": 0,
        },
        "workspace": str(session.workspace),
        "instruction": session.instruction,
        "words_file": str(session.home / WORDS_FILE),
    }
    return Launch(
        argv=[
            f"{session.spec.place}/bin/python",
            *("-P", str(session.home / "mini.py"), str(session.home / "mini.json")),
            *session.spec.arguments,
        ],
        env={
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": str(session.home / ".mini"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        files={"mini.py": _PROGRAM, "mini.json": json.dumps(about)},
        words_file=WORDS_FILE,
    )


MINI_SWE_AGENT = Harness(
    name="mini-swe-agent",
    launch=_launch,
    package=Package(registry="pypi", name="mini-swe-agent", version="2.4.6"),
)
