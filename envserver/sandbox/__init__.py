"""Where model-written programs will run; no environment that ships today writes programs.

An environment that asks for the `sandboxed` level is refused until a sandbox is here.
"""
