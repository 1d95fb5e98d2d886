"""What the engine does with each state, one step a module; and the user's own modules."""
