"""Checks, repair and retention: what can still be read of a lineage, and dropping the bytes of states."""
