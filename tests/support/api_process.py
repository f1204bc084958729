"""Serves the trainer API until it is killed: `python api_process.py STORE PORT`."""

from __future__ import annotations

import asyncio
import sys

from envserver import ServerConfig
from envserver.api import create_api, serve_api
from envserver.store import open_store


async def main(place: str, port: int) -> None:
    async with open_store(place) as store:
        app = create_api(store, settings=ServerConfig())
        async with await serve_api(app, "127.0.0.1", port) as running:
            sys.stdout.write("serving\n")
            sys.stdout.flush()
            await running.wait()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
