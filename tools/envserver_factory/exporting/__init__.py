"""`envserver export`: chooses stored rollouts and writes them in other forms.

export      reads groups, keeps what passes the filters (expressions, choices within a group,
            repeats, overlap with evaluation sets), writes shards
formats     the table of formats; conversations and pairs; shards
readable    unified trajectories and traces
parquet, html, inspect
"""
