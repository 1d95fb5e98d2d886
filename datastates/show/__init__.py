"""How a repository looks in a notebook."""
