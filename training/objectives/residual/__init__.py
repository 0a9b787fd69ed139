"""The refiner: its mathematics (flow), its network (unet), its size against the base (size) and its file (file)."""
