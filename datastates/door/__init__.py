"""The door of a repository, a subject a module: what users call, with what it checks and says; the work is done elsewhere."""
