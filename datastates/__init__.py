"""A lineage store for the states of a DNN while it trains."""
