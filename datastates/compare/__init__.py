"""States compared and combined: diffs, merges, and predictions from several states."""
