"""Tracking one training: the tracker, how it starts, and the guard that takes it back."""
