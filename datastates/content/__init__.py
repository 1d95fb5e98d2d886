"""What a state consists of: its tree, the geometry of its tensors, their digests, and the manifest that describes them. No live objects."""
