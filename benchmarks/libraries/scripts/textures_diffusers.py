"""Latent diffusion on small fabric textures: AutoencoderKL + UNet2DModel (diffusers)."""
import time

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.utils.data import DataLoader, TensorDataset

SIZE = 64
BATCH = 8
STEPS = 150
WARMUP = 5


def make_textures(count=512):
    """Woven patterns in [-1, 1]."""
    gen = torch.Generator().manual_seed(4)
    axis = torch.linspace(0, 12.0, SIZE)
    yy, xx = torch.meshgrid(axis, axis, indexing="ij")
    period = torch.rand(count, 2, 1, 1, generator=gen) * 3 + 1
    warp = torch.sin(period[:, :1] * xx) * 0.5
    weft = torch.sin(period[:, 1:] * yy) * 0.5
    colour = torch.rand(count, 3, 1, 1, generator=gen) * 2 - 1
    image = (warp + weft) * 0.6 + colour * 0.4
    return (image + 0.05 * torch.randn(count, 3, SIZE, SIZE, generator=gen)).clamp(-1, 1)


def load_vae():
    # stands for our pretrained texture autoencoder (factor 4)
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(24, 48, 64),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=SIZE,
    )
    return vae


def load_unet():
    return UNet2DModel(
        sample_size=SIZE // 4,
        in_channels=4,
        out_channels=4,
        layers_per_block=2,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=16,
    )


def forever(loader):
    while True:
        yield from loader


def main():
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(make_textures()), batch_size=BATCH, shuffle=True, drop_last=True)
    vae = load_vae()
    unet = load_unet()
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000, beta_schedule="squaredcos_cap_v2")
    optimizer = torch.optim.AdamW(unet.parameters(), lr=4e-4, weight_decay=1e-2)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 10, STEPS)

    vae.eval()
    unet.train()
    marks, history = [], []
    for step, (pixel_values,) in enumerate(forever(loader)):
        if step == STEPS:
            break
        # images to latent space
        latents = vae.encode(pixel_values).latent_dist.sample()
        latents = latents * vae.config.scaling_factor

        noise = torch.randn_like(latents)
        timesteps = torch.randint(
            0, noise_scheduler.config.num_train_timesteps, (latents.shape[0],), device=latents.device
        )
        noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)

        model_pred = unet(noisy_latents, timesteps).sample
        loss = F.mse_loss(model_pred.float(), noise.float(), reduction="mean")

        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()

        history.append(loss.detach())
        if (step + 1) % 20 == 0:
            recent = torch.stack(history[-20:]).mean().item()
            print(f"step {step + 1}: loss {recent:.4f}, lr {lr_scheduler.get_last_lr()[0]:.2e}")
        marks.append(time.perf_counter())

    steps = torch.tensor(marks, dtype=torch.float64).diff()[WARMUP:]
    print(f"final loss {torch.stack(history[-20:]).mean().item():.4f}")
    print(f"{1000 * steps.mean().item():.1f} ms per step")


if __name__ == "__main__":
    main()
