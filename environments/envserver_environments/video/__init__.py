"""Questions about videos that are known by captions, transcripts and scene graphs, as text."""
