"""The steps that the engine takes with each state, one module for each; and the user's own modules."""
