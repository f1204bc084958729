"""Modules for vLLM's own processes, which find them by `PYTHONPATH`."""
