"""The applications: a server, one that follows it, one that starts, and a sandbox machine."""
