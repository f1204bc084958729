"""The environment `swe`: repair a repository so that tests pass that the agent never sees."""
