"""What trainers and readers ask the server: the native API, the Atropos API, OpenEnv, live."""
