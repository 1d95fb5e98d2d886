"""Moves bytes between processes: connections, the data planes, and the process that runs UCX."""
