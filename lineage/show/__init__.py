"""The lineage presented to people: drawings, words, and numbers in summary. Reads only."""
