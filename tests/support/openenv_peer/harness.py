"""openenv's white-box harness, which TRL's HarnessRolloutWorker drives, before a server of ours:
`harness.py URL BEGIN TURNS`. TURNS are what the model says: pairs of a text and tool calls.
"""

import json
import sys

from openenv import GenericEnvClient
from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import (
    MCPHarnessAdapter,
    ModelStepResult,
    StepEnvSessionAdapter,
    ToolResult,
    VerifyResult,
)
from openenv.core.llm_client import LLMResponse, ToolCall

url, begin, turns = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
client = GenericEnvClient(base_url=url).sync()
first = client.reset(**begin)
functions = [tool["function"] for tool in first.observation["available_tools"]]


def verify(transcript, final_state, last, state):
    """An answer without a tool call is a step, too: the one that ends most episodes."""
    if last is None or not last.done:
        last = client.step({"message": transcript[-1]["content"]})
    return VerifyResult(env_reward=last.reward, done=last.done)


session = StepEnvSessionAdapter(
    client,
    tool_specs=[
        Tool(name=f["name"], description=f["description"], input_schema=f["parameters"])
        for f in functions
    ],
    action_builder=lambda name, arguments: {
        "type": "call_tool",
        "tool_name": name,
        "arguments": arguments,
    },
    initial_messages_builder=lambda result, task: result.observation["messages"],
    tool_result_builder=lambda name, arguments, result, state: ToolResult(
        data=result.observation["result"], done=result.done, metadata={"reward": result.reward}
    ),
    verify_builder=verify,
    reset_kwargs=begin,
)


def model_step(messages, tools, sampling):
    text, calls = turns.pop(0)
    made = [ToolCall(id=f"c{n}", name=name, args=args) for n, (name, args) in enumerate(calls)]
    return ModelStepResult(response=LLMResponse(content=text, tool_calls=made))


rollout = MCPHarnessAdapter().run_white_box(model_step, session)
verified = session.verify(rollout.messages)
session.close()
print(json.dumps({"done": rollout.done, "reward": verified.env_reward}))
