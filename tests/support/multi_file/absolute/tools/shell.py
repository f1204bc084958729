"""A module of the user's package."""
