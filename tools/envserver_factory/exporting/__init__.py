"""`envserver export`: chooses stored rollouts and writes them in other forms.

export      reads groups, keeps what passes the filters, writes shards
filters     expressions, choices within a group, repeats, overlap with evaluation sets
formats     the table of formats, and what a format and its writer are
messages    groups as `process` writes them, conversations, pairs
readable    unified trajectories and traces
parquet, html, inspect
shards      files that appear complete, with checksums, or not at all
"""
