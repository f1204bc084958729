"""An engine on transformers and torch, in its own process, with vLLM's API.

    python -m envserver_local --model DIR_OR_HUB_ID --port 8000

The server does not import it, it starts it: torch and transformers (extra `local`) load only here.
Of this package the server imports only `simulated`, an engine without a model.
"""
