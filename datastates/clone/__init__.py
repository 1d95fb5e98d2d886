"""States between processes: connecting to a peer, serving one's own states, and landing what arrives."""
