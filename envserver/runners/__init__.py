"""Runners on other machines: their protocol with the server, and both sides of it."""
