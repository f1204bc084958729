"""GAIA: questions for assistants that read files, run code and search the web."""
