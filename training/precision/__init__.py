"""Dtypes, what a device can do with them, and which one suits which part of a model."""
