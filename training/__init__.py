"""The training core: datasets, the refiner and its training run. Needs PyTorch only, never ComfyUI."""
