"""Which of the fine-tuning images made this? python examples/lora.py PIPELINE LORA IMAGES PROMPT

PIPELINE is a folder (or a name on the Hub) of a diffusers pipeline, LORA of weights that
`load_lora_weights` takes, IMAGES the folder that the LoRA was fine-tuned on, with its captions
beside the images. Latents are kept in the folder `latents`, so that a second prompt is quick.
"""

from __future__ import annotations

import sys

import diffusers
import torch

import wherefrom


def main(
    pipeline: str, lora: str, images: str, prompt: str, draws: int = 8, inference: int = 50
) -> None:
    """Generate an image and print the fine-tuning images by their influence on it."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(pipeline)
    pipe.load_lora_weights(lora)
    pipe.to("cuda" if torch.cuda.is_available() else "cpu")
    model = wherefrom.from_pipeline(pipe, layers="lora")
    train = model.dataset(images, cache="latents")
    tid = wherefrom.TID(model.denoiser, model.draws(draws)).fit(train)
    # the latents themselves: no way through the VAE and back
    generator = torch.Generator().manual_seed(0)
    size = dict(zip(("height", "width"), model.pixels, strict=True))
    made = pipe(
        prompt, num_inference_steps=inference, generator=generator, output_type="latent", **size
    )
    hits = tid.attribute(model.queries(made.images, prompt), train, top_k=len(train))
    captions = train.captions or [""] * len(train)
    for place, above in zip(hits.indices[0].tolist(), hits.standardised[0].tolist(), strict=True):
        print(f"{above:+.1f}  {train.names[place]}  {captions[place]}")


if __name__ == "__main__":
    main(*sys.argv[1:5])
