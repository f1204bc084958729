"""The environments that ship with envserver; each is a package with an `env.py`."""
