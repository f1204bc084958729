"""Tools of environments: typed functions that models call, and the loop that calls them.

Environments import the names from `envserver`; see this room's README.
"""
