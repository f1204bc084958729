"""What trainers and readers ask the server: the native wire, the Atropos wire, OpenEnv, live."""
