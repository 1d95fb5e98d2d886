"""The routes, one file for each noun. Each route parses, calls one function, and renders."""
