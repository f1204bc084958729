"""The earlier name of `environments.gaia`: its commands go on working."""
