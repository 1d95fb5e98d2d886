"""Plans: the trees of variants that a study trains, as plain data, and builders for the usual shapes."""
