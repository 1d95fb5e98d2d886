"""Opening a repository: where it is, who is alive in it, what dead processes left behind, and what a process owns while it tracks."""
