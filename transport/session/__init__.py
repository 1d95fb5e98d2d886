"""One authenticated connection between two processes, and what both ends ask, answer and send over it."""
