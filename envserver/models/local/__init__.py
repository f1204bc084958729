"""An engine on transformers and torch, in its own process, with vLLM's API.

    python -m envserver.models.local --model DIR_OR_HUB_ID --port 8000

Nothing else in the package imports it: torch and transformers (extra `local`) load only there.
"""
