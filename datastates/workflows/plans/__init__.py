"""What a study trains: trees of variants as plain data, and their usual shapes."""
