"""Changing the lineage: recording states, moving refs, dropping bytes. Each function is one step of a transaction of its caller."""
