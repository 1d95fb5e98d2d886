"""Running a plan: its variants become tasks of an executor, and their results become states of the lineage."""
