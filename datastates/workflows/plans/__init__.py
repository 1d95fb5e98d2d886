"""Plans: the trees of variants that a study trains, as plain data, and their usual shapes."""
