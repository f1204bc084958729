"""An engine on transformers and torch, in a process of its own, that speaks vLLM's dialect.

    python -m envserver.models.local --model DIR_OR_HUB_ID --port 8000

Nothing else in the package imports it: torch and transformers (extra `local`) load only there.
"""
