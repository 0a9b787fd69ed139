"""Give each part of a model a dtype of its own, see what that does to it, and name the layer that made a NaN."""
