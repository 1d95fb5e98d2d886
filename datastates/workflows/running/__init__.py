"""Running a plan: its variants as tasks of an executor, and what becomes of them in the lineage."""
