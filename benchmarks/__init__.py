"""Measurements of the pack, as ratios. Run from the repository's root: `python -m benchmarks.<script>`."""
