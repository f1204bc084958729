"""Engines behind the proxy; README.md draws the path of a request."""
