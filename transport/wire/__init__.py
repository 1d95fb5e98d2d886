"""Bytes between processes: connections, the data planes, the process that runs UCX."""
