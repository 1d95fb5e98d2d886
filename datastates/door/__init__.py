"""The door of a repository: the methods that users call, one module for each subject. They check arguments; the work is done elsewhere."""
