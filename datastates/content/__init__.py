"""What a state consists of: its tree, the geometry of its tensors, their digests, and the manifest that says it all. No live objects."""
