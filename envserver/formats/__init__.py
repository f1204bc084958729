"""Conversions of groups that HTTP routes and exported files share."""
