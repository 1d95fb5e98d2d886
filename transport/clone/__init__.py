"""One state from one or several sources, checked chunk by chunk, and passed on."""
