"""Classic, with a class of its own: it answers guesses, and its reward reads its state."""

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    """A number is guessed."""

    async def setup_state(self, state):
        state["guesses"] = []
        state["open_file"] = object()  # JSON cannot hold it
        return state

    @vf.stop
    async def found(self, state):
        return bool(state["guesses"]) and state["guesses"][-1] == state["answer"]

    async def env_response(self, messages, state, **kwargs):
        state["guesses"].append(messages[-1]["content"].strip())
        if state["guesses"][-1] == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        return [{"role": "user", "content": "No. Again."}]


def fewer_is_better(state):
    """2 for one guess, 1 for two, and so on; it needs what JSON cannot hold."""
    assert type(state["open_file"]) is object
    return 2.0 / len(state["guesses"]) if state["guesses"] else 0.0


def load_environment():
    rows = [{"question": "Guess my number.", "answer": str(number)} for number in range(4)]
    return Guess(
        dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[fewer_is_better]), max_turns=3
    )
