"""The worlds that conversations are about: tools, data and policies of each domain."""
