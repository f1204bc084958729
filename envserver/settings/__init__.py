"""The settings, by the sections of the command line; `config` is the whole tree."""
