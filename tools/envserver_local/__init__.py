"""Engines for this machine.

On transformers and torch (extra `local`), in a process of its own, with vLLM's API:

    python -m envserver_local --model DIR_OR_HUB_ID --port 8000

The server only starts it. It imports `simulated`, an engine without a model that needs no extra.
"""
