"""The loops that people already have: one module a framework, which imports its framework only when it is used."""
