"""Finding states: revisions, queries, walks along parents, curves. Reads only."""
