"""States between processes: connecting to a peer, serving one's own, and landing what arrives."""
