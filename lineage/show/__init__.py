"""The lineage for people: drawings, words, numbers at a glance. Reads only."""
