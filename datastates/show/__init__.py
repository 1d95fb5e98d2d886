"""How a repository is shown in a notebook."""
