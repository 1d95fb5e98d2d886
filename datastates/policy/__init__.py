"""Policies: pure functions that decide what becomes durable."""
