"""The earlier name of `envserver_environments.gaia`: its commands still work."""
