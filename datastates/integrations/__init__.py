"""Integrations with existing training loops: one module for each framework, which imports its
framework only when it is used."""
