"""The environments that `envserver init` begins with, one file a kind.

They are checked and tested like our own code. `create` writes them with another name in the place
of `MyEnv` and `my_env`.
"""
