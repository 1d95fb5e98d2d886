"""What can still be had of a lineage, and dropping the bytes of states."""
