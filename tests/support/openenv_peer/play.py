"""Plays an environment with openenv's own client: `play.py URL ACTIONS`, both as JSON in argv.

ACTIONS: what reset gets, then an action for each turn. Prints all results as JSON. The same is
played twice: with the asynchronous and with the blocking client.
"""

import asyncio
import json
import sys

from openenv import GenericEnvClient


def shown(result):
    return {"observation": result.observation, "reward": result.reward, "done": result.done}


async def play(url, begin, actions):
    async with GenericEnvClient(base_url=url) as env:
        results = [await env.reset(**begin)]
        results += [await env.step(action) for action in actions]
        return [*map(shown, results), await env.state()]


def play_blocking(url, begin, actions):
    with GenericEnvClient(base_url=url).sync() as env:
        results = [env.reset(**begin), *(env.step(action) for action in actions)]
        return [*map(shown, results), env.state()]


url, (begin, *actions) = sys.argv[1], json.loads(sys.argv[2])
print(json.dumps([asyncio.run(play(url, begin, actions)), play_blocking(url, begin, actions)]))
