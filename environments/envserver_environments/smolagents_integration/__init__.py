"""The earlier name of `envserver_environments.gaia`: its commands go on working."""
