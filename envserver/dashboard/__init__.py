"""The web page of a running server will live here; `/v1/status` says in JSON what it will show."""
