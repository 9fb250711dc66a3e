"""Attribution for a UNet of diffusers that is trained with its DDPM scheduler: python
examples/ddpm_unet.py

The loop is that of diffusers' own training example. wherefrom reads process and timesteps from the
scheduler's config. The data are the digits of scikit-learn; it takes some minutes on a CPU.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor

import wherefrom


def unet(width: int) -> Any:
    """A small one, for images [1, 8, 8]."""
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(width, 2 * width),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=width // 2,
        norm_num_groups=width // 2,
    )


def trained(
    images: Tensor, scheduler: Any, steps: int, width: int = 32, batch_size: int = 64
) -> Any:
    """A UNet after so many steps on images [N, 1, 8, 8]."""
    generator = torch.Generator().manual_seed(0)
    network = unet(width)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    levels = scheduler.config.num_train_timesteps
    for _ in range(steps):
        x = images[torch.randint(len(images), (batch_size,), generator=generator)]
        t = torch.randint(levels, (batch_size,), generator=generator)
        noise = torch.randn(x.shape, generator=generator)
        loss = F.mse_loss(network(scheduler.add_noise(x, noise, t), t).sample, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


def main(
    steps: int = 2000, count: int = 1797, width: int = 32, draws: int = 8, inference: int = 50
) -> None:
    """Train on `count` digits, generate two, and print the training digits that made them."""
    items = wherefrom.data.digits(labels=True)
    images = torch.stack([items[place][0] for place in range(count)])
    scheduler = diffusers.DDPMScheduler()
    network = trained(images, scheduler, steps, width)
    pipe = diffusers.DDPMPipeline(network, scheduler)
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        batch_size=2,
        generator=torch.Generator().manual_seed(1),
        num_inference_steps=inference,
        output_type="np",
    ).images  # [2, 8, 8, 1] in [0, 1]
    queries = torch.from_numpy(made).movedim(-1, 1) * 2 - 1

    model = wherefrom.from_model(network, scheduler)
    tid = wherefrom.TID(model.denoiser, model.draws(draws))
    hits = tid.fit(images, samples=min(600, count)).attribute(queries, images, top_k=5)
    for query, (places, above) in enumerate(zip(hits.indices, hits.standardised, strict=True)):
        for place, far in zip(places.tolist(), above.tolist(), strict=True):
            print(f"image {query}: digit {place}, a {items[place][1]}, {far:+.1f} deviations")


if __name__ == "__main__":
    main()
