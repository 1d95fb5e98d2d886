"""Fetches one state from one or several sources, checks it chunk by chunk, and passes it on."""
