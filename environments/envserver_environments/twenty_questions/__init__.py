"""Twenty questions: the secret is on the server, each question is paid for what it finds out."""
