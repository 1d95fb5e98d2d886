"""Policies: pure functions that decide which states become durable, and which keep their bytes."""
