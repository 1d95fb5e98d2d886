"""Changing the lineage: recording states, moving refs, dropping bytes. Each function is one step of its caller's transaction."""
