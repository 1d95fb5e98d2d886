"""Ranks of one job."""
