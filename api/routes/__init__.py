"""The routes, one file a noun; each parses, calls one function, renders."""
