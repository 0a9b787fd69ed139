"""A text-to-image training loop as one writes it with diffusers and accelerate: our own re-creation to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import autocast

from training.config.network import UNetConfig, preset
from training.objectives.residual.unet import build_unet

TOKENS = 77


@dataclass(frozen=True)
class Sizes:
    side: int  # of the pictures, in pixels; latents have an eighth of it
    batch: int = 4
    threads: int = 0
    tiny: bool = False  # small networks: only to see that the script works

    @property
    def unet(self) -> UNetConfig:
        if not self.tiny:
            return preset("sd15-half", latent_channels=4)
        return UNetConfig(
            latent_channels=4, block_channels=(32, 64), layers_per_block=1, transformer_depth=(1, 0), heads=(2, 2)
        )

    @property
    def vae_channels(self) -> tuple[int, ...]:
        return (32,) * 4 if self.tiny else (128, 256, 512, 512)

    @property
    def text_layers(self) -> int:
        return 1 if self.tiny else 12


@dataclass(frozen=True)
class Variant:
    ours: bool = False
    cached_latents: bool = False
    cached_text: bool = False
    fused: bool = False
    accelerate: bool = True
    checkpointing: bool = False
    precision: str = "fp32"


class RecipeLoop:
    """Text-to-image training of a UNet that also sees a base latent, which is in memory in every variant."""

    def __init__(self, variant: Variant, sizes: Sizes):
        from diffusers import DDPMScheduler
        from diffusers.optimization import get_scheduler

        torch.manual_seed(0)
        self.variant = variant
        self.dtype = torch.bfloat16 if variant.precision == "bf16" else torch.float32
        self.noising = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
        self.unet = build_unet(sizes.unet).train()
        if variant.checkpointing:
            self.unet.enable_gradient_checkpointing()
        self.vae = None if variant.cached_latents else make_vae(sizes).to(self.dtype)
        self.text = None if variant.cached_text else make_text_encoder(sizes).to(self.dtype)
        self.optimizer = torch.optim.AdamW(self.unet.parameters(), 1e-4, weight_decay=0.01, fused=variant.fused)
        self.rate = get_scheduler("constant", self.optimizer)
        loader = torch.utils.data.DataLoader(self._samples(sizes), batch_size=sizes.batch, shuffle=True)
        self.accelerator = None
        if variant.accelerate:
            from accelerate import Accelerator

            mixed = "bf16" if variant.precision == "bf16" else "no"
            self.accelerator = Accelerator(cpu=True, mixed_precision=mixed, gradient_accumulation_steps=1)
            self.unet, self.optimizer, loader, self.rate = self.accelerator.prepare(
                self.unet, self.optimizer, loader, self.rate
            )
        self.batches = self._without_end(loader)

    def _samples(self, sizes: Sizes) -> list[dict[str, torch.Tensor]]:
        latent = (4, sizes.side // 8, sizes.side // 8)
        samples = []
        for _ in range(2 * sizes.batch):
            sample = {"base": torch.randn(latent)}
            if self.variant.cached_latents:
                sample["latent"] = torch.randn(latent)
            else:
                sample["picture"] = torch.rand(3, sizes.side, sizes.side) * 2 - 1
            if self.variant.cached_text:
                sample["context"] = torch.randn(TOKENS, 768)
            else:
                sample["tokens"] = torch.randint(1000, 40_000, (TOKENS,))
            samples.append(sample)
        return samples

    @staticmethod
    def _without_end(loader) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield from loader

    def step(self) -> None:
        batch = next(self.batches)
        if self.accelerator is None:
            with autocast("cpu", torch.bfloat16, enabled=self.dtype is torch.bfloat16):
                loss = self._loss(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.unet.parameters(), 1.0)
            self._update()
            loss.detach().item()
            return
        with self.accelerator.accumulate(self.unet):
            loss = self._loss(batch)
            self.accelerator.gather(loss.detach().repeat(len(batch["base"]))).mean().item()
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.unet.parameters(), 1.0)
            self._update()

    def _update(self) -> None:
        self.optimizer.step()
        self.rate.step()
        self.optimizer.zero_grad()

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            if self.vae is None:
                latent = batch["latent"]
            else:
                encoded = self.vae.encode(batch["picture"].to(self.dtype)).latent_dist
                latent = encoded.sample() * self.vae.config.scaling_factor
            context = batch["context"] if self.text is None else self.text(batch["tokens"])[0]
        noise = torch.randn_like(latent)
        times = torch.randint(0, self.noising.config.num_train_timesteps, (len(latent),))
        noisy = self.noising.add_noise(latent, noise, times)
        seen = torch.cat([noisy, batch["base"].to(noisy.dtype)], 1)
        answer = self.unet(seen, times, context.to(noisy.dtype), return_dict=False)[0]
        return torch.nn.functional.mse_loss(answer.float(), noise.float())


def make_vae(sizes: Sizes):
    """SD1.5's autoencoder with random weights, frozen."""
    from diffusers import AutoencoderKL

    channels = sizes.vae_channels
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        layers_per_block=2,
        latent_channels=4,
        sample_size=512,
    )
    return vae.eval().requires_grad_(False)


def make_text_encoder(sizes: Sizes):
    """The text half of CLIP ViT-L/14 with random weights, frozen."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=49_408, hidden_size=768, intermediate_size=3072, num_hidden_layers=sizes.text_layers,
        num_attention_heads=12, max_position_embeddings=TOKENS, projection_dim=768,
    )
    return CLIPTextModel(config).eval().requires_grad_(False)
