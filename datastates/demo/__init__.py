"""``datastates demo``: the main job, on real data, with a proof at its end."""
