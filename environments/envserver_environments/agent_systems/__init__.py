"""The agents' module names of VideoMultiAgents_HOEY, below this package's name."""
