"""States as files that can be carried elsewhere and that other programs can read."""
