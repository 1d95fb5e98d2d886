"""Live objects of a training: how each kind becomes a plain tree of tensors, and how a stored tree is put back into it."""
