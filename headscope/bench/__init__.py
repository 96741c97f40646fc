"""The cost of measuring: time and peak memory as ratios to the plain forward pass, in one process."""
