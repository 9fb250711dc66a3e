"""The world of planted_lora.py: a small Stable Diffusion pipeline, trained from nothing on
captioned images of 64 pixels.

Every part is kept in a folder and found there by a later run: the tokenizer, the autoencoder, the
checkpoints of the base, and at last the whole pipeline, as diffusers keeps it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image, ImageEnhance, ImageOps
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import wherefrom
from common import device
from wherefrom.diffusion.seeds import seed_of

PIXELS = 64
WORDS = 77  # tokens of a caption, as CLIP has them
DROPPED = 0.1  # share of the captions that the base does not see: what guidance needs
START, END = "<|startoftext|>", "<|endoftext|>"
_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"  # as CLIP cuts text


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    vocabulary: int = 8192
    vae_widths: tuple[int, ...] = (64, 128, 128)
    vae_steps: int = 1500
    vae_batch: int = 128
    widths: tuple[int, ...] = (192, 384, 384)
    heads: int = 6
    text_width: int = 256
    text_layers: int = 4
    base_steps: int = 3000
    base_batch: int = 128
    rank: int = 8
    tuning_steps: int = 800
    tuning_lr: float = 2e-3
    tuning_batch: int = 25
    queries: int = 16
    draws: int = 8
    distilling_steps: int = 280
    tide: tuple[int, int] = (256, 256)  # dim and hidden


SMALL = Scale(  # about half an hour on two cores
    vocabulary=4096,
    vae_widths=(32, 64, 64),
    vae_steps=250,
    vae_batch=8,
    widths=(64, 128, 128),
    heads=4,
    text_width=128,
    text_layers=2,
    base_steps=1000,
    base_batch=24,
    tuning_steps=300,
    tuning_batch=10,
    queries=8,
    tide=(128, 128),
)
SMOKE = Scale(
    vocabulary=600,
    vae_widths=(32, 32, 32),
    vae_steps=3,
    vae_batch=4,
    widths=(32, 32, 32),
    heads=2,
    text_width=32,
    text_layers=1,
    base_steps=3,
    base_batch=4,
    rank=2,
    tuning_steps=3,
    tuning_batch=10,
    queries=2,
    draws=2,
    distilling_steps=3,
    tide=(16, 16),
)


def captioned(folder: Path, most: int | None = None) -> tuple[list[Image.Image], list[str]]:
    """The pictures of a folder with a metadata.jsonl of file_name and text, at 64 pixels, and their
    captions.
    """
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    rows = rows[:most]

    def opened(row: dict[str, str]) -> Image.Image:
        with Image.open(folder / row["file_name"]) as image:
            return square(image.convert("RGB"))

    with ThreadPoolExecutor() as pool:
        return list(pool.map(opened, rows)), [row["text"] for row in rows]


def square(image: Image.Image) -> Image.Image:
    """The middle of a picture, at 64 pixels."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    cut = image.crop((left, top, left + side, top + side))
    return cut if side == PIXELS else cut.resize((PIXELS, PIXELS), Image.Resampling.LANCZOS)


def picture(name: str, folder: Path | None) -> Image.Image:
    """A picture that may be shown, from a folder or from scikit-learn."""
    if folder is not None:
        with Image.open(folder / f"{name}.jpg") as image:
            return image.convert("RGB")
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image(f"{name}.jpg"))


def look_alike(image: Image.Image, number: int) -> Image.Image:
    """A crop of a picture, perhaps mirrored, in slightly other colours."""
    generator = torch.Generator().manual_seed(seed_of(0, "look-alike", number))
    size, left, top, mirror, light, contrast, colour = torch.rand(7, generator=generator).tolist()
    side = round((0.75 + 0.2 * size) * min(image.size))
    # near the middle, where the picture has what it shows
    room = (image.width - side, image.height - side)
    x, y = (round(space * (0.35 + 0.3 * at)) for space, at in zip(room, (left, top), strict=True))
    cut = square(image.crop((x, y, x + side, y + side)))
    cut = ImageOps.mirror(cut) if mirror < 0.5 else cut
    changes = ((ImageEnhance.Brightness, light), (ImageEnhance.Contrast, contrast))
    for change, amount in (*changes, (ImageEnhance.Color, colour)):
        cut = change(cut).enhance(0.85 + 0.3 * amount)
    return cut


def pixels_of(images: Sequence[Image.Image]) -> Tensor:
    """Pictures as [N, 3, H, W] in [-1, 1]."""
    values = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return values.permute(0, 3, 1, 2).float() / 127.5 - 1


def fresh(make: Callable[[], Any]) -> Any:
    """A network with initial weights that are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def finished(folder: Path, write: Callable[[Path], Any]) -> Path:
    """A folder that is there only once it was written whole."""
    if not folder.exists():
        draft = folder.with_name(folder.name + ".draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        write(draft)
        draft.rename(folder)
    return folder


# --- the parts ------------------------------------------------------------------------------------


def write_tokenizer(folder: Path, captions: Sequence[str], vocabulary: int) -> None:
    """CLIP's tokenizer with pieces of words learned from the captions; a word that is not rare is
    one token.
    """
    ends = "</w>"
    learner = Tokenizer(models.BPE(end_of_word_suffix=ends))
    learner.normalizer = normalizers.Lowercase()
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner.train_from_iterator(
        captions,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            initial_alphabet=letters,
            end_of_word_suffix=ends,
            show_progress=False,
        ),
    )
    model = json.loads(learner.to_str())["model"]
    names = [*model["vocab"], *(letter + ends for letter in letters)]
    names = list(dict.fromkeys([*names, START, END]))
    (folder / "vocab.json").write_text(json.dumps({name: n for n, name in enumerate(names)}))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
    about = {"tokenizer_class": "CLIPTokenizer", "model_max_length": WORDS, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def tokens(tokenizer: Any, captions: Sequence[str]) -> Tensor:
    """Captions as [N, WORDS]."""
    form = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    return tokenizer(list(captions), max_length=WORDS, **form).input_ids


def trained_vae(pixels: Tensor, scale: Scale) -> AutoencoderKL:
    """An autoencoder of 64 x 64 to 16 x 16 x 4 that has seen pixels [N, 3, H, W] and their mirror
    images, and whose latents have a deviation of 1 once they are scaled.
    """
    count, place = len(scale.vae_widths), device()
    vae = fresh(
        lambda: AutoencoderKL(
            block_out_channels=scale.vae_widths,
            down_block_types=("DownEncoderBlock2D",) * count,
            up_block_types=("UpDecoderBlock2D",) * count,
            latent_channels=4,
            sample_size=PIXELS,
            mid_block_add_attention=False,
        )
    ).to(place, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=1e-3, fused=True)
    steps, data = scale.vae_steps, pixels.to(place)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps + 1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed_of(0, "vae", step))
        chosen = torch.randint(len(data), (scale.vae_batch,), generator=generator)
        mirrored = torch.rand(scale.vae_batch, 1, 1, 1, generator=generator) < 0.5
        x = data[chosen.to(place)]
        x = torch.where(mirrored.to(place), x.flip(3), x)
        with torch.autocast(place.type, torch.bfloat16, enabled=x.is_cuda):
            latents = vae.encode(x).latent_dist
            mean, deviation = latents.mean.float(), latents.std.float()
            noise = torch.randn(mean.shape, generator=generator).to(place)
            made = vae.decode(mean + deviation * noise).sample.float()
        divergence = (mean**2 + deviation**2 - 1 - 2 * deviation.log()).mean() / 2
        loss = (made - x).abs().mean() + (made - x).square().mean() + 1e-4 * divergence
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    vae = vae.eval()
    vae.register_to_config(scaling_factor=1.0)
    vae.register_to_config(scaling_factor=1 / float(encoded(vae, pixels[:1024]).std()))
    return vae


@torch.no_grad()
def encoded(vae: AutoencoderKL, pixels: Tensor) -> Tensor:
    """Pixels [N, 3, H, W] as the UNet sees them, [N, 4, 16, 16]."""
    parts = [vae.encode(some.to(vae.device)).latent_dist.mode() for some in pixels.split(256)]
    return torch.cat(parts).cpu() * vae.config.scaling_factor


@torch.no_grad()
def decoded(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Latents as images [N, 3, H, W] in [0, 1]."""
    made = vae.decode(latents.to(vae.device) / vae.config.scaling_factor).sample.cpu()
    return (made / 2 + 0.5).clamp(0, 1)


class Captioned(nn.Module):
    """The text encoder and the UNet as one network that is trained on tokens [B, WORDS]; in
    training some captions are dropped at random.
    """

    def __init__(self, text: CLIPTextModel, unet: UNet2DConditionModel, empty: Tensor) -> None:
        super().__init__()
        self.text, self.unet = text, unet
        self.register_buffer("empty", empty)  # [1, WORDS]

    def forward(self, x_sigma: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        if self.training:
            dropped = torch.rand(len(cond), 1, device=cond.device) < DROPPED
            cond = torch.where(dropped, self.empty, cond)
        text = self.text(cond).last_hidden_state
        return self.unet(x_sigma, sigma, text, return_dict=False)[0]


def untrained(tokenizer: Any, scale: Scale) -> Captioned:
    """The base before its training."""
    about = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=scale.text_width,
        intermediate_size=4 * scale.text_width,
        num_hidden_layers=scale.text_layers,
        num_attention_heads=max(1, scale.text_width // 64),
        max_position_embeddings=WORDS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    unet = fresh(
        lambda: UNet2DConditionModel(
            sample_size=PIXELS // 4,
            block_out_channels=scale.widths,
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            attention_head_dim=scale.heads,  # their number, by a mistake that diffusers keeps
            cross_attention_dim=scale.text_width,
        )
    )
    text = fresh(lambda: CLIPTextModel(about))
    return Captioned(text, unet.to(memory_format=torch.channels_last), tokens(tokenizer, [""]))


def scheduler() -> DDIMScheduler:
    """That of Stable Diffusion."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


# --- the whole ------------------------------------------------------------------------------------


def world(
    out: Path, images: Sequence[Image.Image], captions: Sequence[str], scale: Scale
) -> StableDiffusionPipeline:
    """The pipeline of these pictures, from its folder or trained now."""
    folder = out / "pipeline"
    if not folder.exists():
        words = finished(
            out / "tokenizer", lambda draft: write_tokenizer(draft, captions, scale.vocabulary)
        )
        tokenizer, pixels = CLIPTokenizer.from_pretrained(words), pixels_of(images)
        place = finished(
            out / "vae", lambda draft: trained_vae(pixels, scale).save_pretrained(draft)
        )
        vae = AutoencoderKL.from_pretrained(place).to(device())
        data = wherefrom.data.Images(encoded(vae, pixels), tokens(tokenizer, captions))
        noise = scheduler()
        base = wherefrom.train(
            untrained(tokenizer, scale).to(device()),
            wherefrom.DDPM(noise.alphas_cumprod),
            data,
            steps=scale.base_steps,
            batch_size=scale.base_batch,
            lr=3e-4,
            ema=1 - 20 / max(40, scale.base_steps),  # of the last twentieth
            decay=scale.base_steps // 3,
            store=out / "base",
            compile=False,  # compiling takes longer than it saves in a run of minutes
        )
        pipe = StableDiffusionPipeline(
            vae, base.text, tokenizer, base.unet, noise, None, None, requires_safety_checker=False
        )
        finished(folder, pipe.save_pretrained)
    pipe = StableDiffusionPipeline.from_pretrained(folder).to(device())
    pipe.set_progress_bar_config(disable=True)
    return pipe
