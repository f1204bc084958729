"""Two environments on openenv's own server: `games.py PORT` serves /guess and /desk."""

import sys

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Guess(Action):
    guess: int


class Hint(Observation):
    text: str = ""


class Guessing(Environment):
    """Guess a number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.secret = 7
        return Hint(text="Guess a number from 1 to 9.")

    def step(self, action, timeout_s=None, **options):
        if action.guess == self.secret:
            return Hint(text="Right.", reward=1.0, done=True)
        return Hint(text="More." if action.guess < self.secret else "Less.", reward=0.1)

    @property
    def state(self):
        return State()


class Desk(MCPEnvironment):
    """Save the right number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("desk")
        self.saved = None

        @tools.tool
        def save(number: int) -> str:
            """Saves a number."""
            self.saved = number
            return f"saved {number}"

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **options):
        return Observation(metadata={"seed": seed})

    def step(self, action, timeout_s=None, **options):
        seen = super().step(action, timeout_s=timeout_s, **options)
        if isinstance(action, CallToolAction):
            seen.done, seen.reward = self.saved == 7, float(self.saved == 7)
        return seen

    async def step_async(self, action, timeout_s=None, **options):
        seen = await super().step_async(action, timeout_s=timeout_s, **options)
        if isinstance(action, CallToolAction):
            seen.done, seen.reward = self.saved == 7, float(self.saved == 7)
        return seen

    def _step_impl(self, action, timeout_s=None, **options):
        raise ValueError("there are only tools")

    @property
    def state(self):
        return State()


app = FastAPI()
app.mount("/guess", create_app(Guessing, Guess, Hint, env_name="guess", max_concurrent_envs=1))
app.mount("/desk", create_app(Desk, CallToolAction, CallToolObservation, env_name="desk"))
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
