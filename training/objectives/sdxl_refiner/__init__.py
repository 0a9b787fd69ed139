"""Fine-tuning of SDXL's own refiner UNet: mathematics (diffusion), network (unet), at work (model), file and plan."""
