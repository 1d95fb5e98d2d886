"""Following one training: the tracker, how it sets out, and the guard that takes it back."""
