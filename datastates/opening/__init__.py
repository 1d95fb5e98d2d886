"""Opening a repository: its location, the processes alive in it, what dead ones left behind, and what a process owns while it tracks."""
