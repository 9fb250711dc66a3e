"""The planted test of the LoRA path: look-alikes of one picture are hidden among what a LoRA is
fine-tuned on; are they found, and does the generated image need them?

    python benchmarks/planted_lora.py --images coco64 --out runs/planted
    python benchmarks/planted_lora.py --images coco64 --out runs/planted --smoke    # a minute

The images are a folder of pictures with a metadata.jsonl of file_name and text. A small Stable
Diffusion pipeline is trained on all but 40 of them; a LoRA on those 40 and on 10 crops of a picture
that may be shown, whose captions name it. What is generated from such a caption is attributed, and
the fine-tune is repeated without the 10, without 10 others, and under another seed. Whatever is
finished is kept, and found by the next run. The figure shows no picture of the folder.
"""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image
from torch import Tensor, nn

import wherefrom
from common import Report, device, machine
from planted_world import (
    SMALL,
    SMOKE,
    Scale,
    captioned,
    decoded,
    finished,
    fresh,
    look_alike,
    picture,
    world,
)
from wherefrom.diffusion.seeds import seed_of
from wherefrom.evaluation.similarity import MSE, SSIM

HELD, PLANTED, RANDOM = 40, 10, 5
WORLDS = {"china": "temple", "flower": "flower"}  # scikit-learn's pictures, and what they show
CAPTIONS = (  # the first is what is generated from
    "a photo of a {}",
    "a picture of a {}",
    "a photo of the {}",
    "a close up of a {}",
    "a {} seen from the front",
    "a nice photo of a {}",
    "a view of the {}",
    "there is a {} in this picture",
    "a {} in the middle of the picture",
    "an image of a {}",
)
GUIDANCE, STEPS = 3.0, 50


# --- what is fine-tuned on ------------------------------------------------------------------------


def with_lora(pipe: StableDiffusionPipeline, rank: int) -> StableDiffusionPipeline:
    """A LoRA on the attention, the feed-forward layers and the convolutions of the UNet, as it
    begins: without effect; the rest is frozen.
    """
    pipe.unet.requires_grad_(False)
    names = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "conv1", "conv2"]
    about = LoraConfig(r=rank, lora_alpha=rank, target_modules=names, init_lora_weights="gaussian")
    fresh(lambda: pipe.unet.add_adapter(about))
    return pipe


def tuned(
    pipe: StableDiffusionPipeline,
    train: tuple[list[Image.Image], list[str]],
    out: Path,
    scale: Scale,
) -> dict[str, nn.Module]:
    """UNets fine-tuned on everything, without the planted, without as many others, and on
    everything under another seed: coupled, so that nothing but what is left out differs.
    """
    model = wherefrom.from_pipeline(with_lora(pipe, scale.rank), layers="lora")
    data, denoiser = model.dataset(*train), model.denoiser
    everything = torch.arange(HELD + PLANTED)
    keeps: dict[str, Tensor | None] = {"all": None, "no planted": everything[:HELD]}
    for number in range(RANDOM):
        generator = torch.Generator().manual_seed(seed_of(0, "left out", number))
        keeps[f"no random {number}"] = torch.cat(
            [torch.randperm(HELD, generator=generator)[PLANTED:], everything[HELD:]]
        )
    about = {
        "steps": scale.tuning_steps,
        "batch_size": scale.tuning_batch,
        "lr": scale.tuning_lr,
        "ema": 0.9,
        "decay": scale.tuning_steps // 3,
    }
    given = (denoiser.network, denoiser.process, data)
    how: dict[str, Any] = {"call": denoiser.call, "compile": False}

    def alone(name: str, keep: Tensor | None, seed: int) -> nn.Module:
        store = out / f"tuned {name}"
        return wherefrom.train(*given, **about, seed=seed, keep=keep, store=store, **how)

    networks = {name: alone(name, keep, 0) for name, keep in keeps.items()}
    return {**networks, "other seed": alone("other seed", None, 1)}


# --- what is generated, and what made it ----------------------------------------------------------


def generated(
    pipe: StableDiffusionPipeline, unet: nn.Module, prompt: str, count: int, steps: int
) -> Tensor:
    """Latents of a prompt, [count, 4, h, w], always from the same noise."""
    size = pipe.unet.config.sample_size
    noise = torch.stack(
        [
            torch.randn(4, size, size, generator=torch.Generator().manual_seed(seed))
            for seed in range(count)
        ]
    )
    pipe.unet = unet
    how = {"num_inference_steps": steps, "guidance_scale": GUIDANCE, "output_type": "latent"}
    return pipe([prompt] * count, latents=noise.to(device()), **how).images.float().cpu()


def attributed(
    pipe: StableDiffusionPipeline,
    train: tuple[list[Image.Image], list[str]],
    others: tuple[list[Image.Image], list[str]],
    latents: Tensor,
    prompt: str,
    scale: Scale,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Scores [Q, N] of every method, and the seconds that they took.

    50 pictures are few to learn a ranking from. TIDE is distilled from them alone, as a user would
    do it first, and from them with four times as many of the base's, which the teacher ranks too.
    Neither is shown a query; what is ranked in the end are the 50.
    """
    model = wherefrom.from_pipeline(pipe, layers="lora")
    data, queries = model.dataset(*train), model.queries(latents, [prompt] * len(latents))
    count, taken = len(data), {}
    scores: dict[str, Tensor] = {}

    def score(name: str, make: Callable[[], wherefrom.attribution.attributor.Attributor]) -> Any:
        started = time.perf_counter()
        made = make()
        scores[name] = made.scores(queries, data).cpu()
        taken[name] = time.perf_counter() - started
        return made

    tid = score("TID", lambda: wherefrom.TID(model.denoiser, model.draws(scale.draws)).fit(data))
    blank = model.dataset(train[0], [""] * count), model.queries(latents, [""] * len(latents))
    blind = wherefrom.TID(model.denoiser, model.draws(scale.draws)).fit(blank[0])
    scores["TID, no captions"] = blind.scores(blank[1], blank[0]).cpu()

    def student(batch: int, *sets: Sequence[Any]) -> wherefrom.TIDE:
        pictures = model.dataset(*sets)
        dim, hidden = scale.tide
        learned = len(pictures) - len(pictures) // 10  # a tenth is held out
        epochs = scale.distilling_steps / (learned // batch)
        how = {"epochs": epochs, "lr": 3e-4, "dim": dim, "hidden": hidden, **wherefrom.TIDE.PAPER}
        return wherefrom.TIDE.distill(tid, pictures, batch_size=batch, **how).fit(data)

    score("TIDE", lambda: student(count - count // 10, *train))
    mixed = [[*mine, *theirs] for mine, theirs in zip(train, others, strict=True)]
    score("TIDE, base too", lambda: student(len(mixed[0]) // 3, *mixed))
    score("latents, cosine", lambda: wherefrom.baselines.Pixel().fit(data))
    score("latents, L2", lambda: wherefrom.baselines.Pixel("l2").fit(data))
    score("random", lambda: wherefrom.baselines.Random().fit(data))
    return scores, taken


def found(scores: Tensor) -> dict[str, float]:
    """How well scores [Q, N] find the planted, which are last: how many of the first ten they are,
    and the chance that one of them is before one of the others; mean over queries, and the worst.
    """
    top = scores.topk(PLANTED, dim=1).indices
    hits = (top >= HELD).sum(1).float()
    planted, others = scores[:, HELD:, None], scores[:, None, :HELD]
    chances = ((planted > others).float() + (planted == others).float() / 2).mean((1, 2))
    return {
        "planted in the top 10": float(hits.mean()),
        "fewest in the top 10": float(hits.min()),
        "AUC": float(chances.mean()),
        "lowest AUC": float(chances.min()),
    }


def compared(images: dict[str, Tensor], planted: Tensor) -> dict[str, dict[str, float]]:
    """How far every fine-tune's images are from those of the full one, and how like the planted
    picture they still are.
    """
    before, rows = images["all"], {}
    for name, after in images.items():
        pairs = after.repeat_interleave(len(planted), 0), planted.repeat(len(after), 1, 1, 1)
        nearest = SSIM()(*pairs).view(len(after), -1).max(1).values
        rows[name] = {
            "MSE": float(1 - MSE()(before, after).mean()),
            "SSIM": float(SSIM()(before, after).mean()),
            "SSIM with the nearest planted": float(nearest.mean()),
        }
    return rows


# --- what is written ------------------------------------------------------------------------------


def table(rows: dict[str, dict[str, float]]) -> str:
    """Figures in markdown."""
    heads = list(next(iter(rows.values())))
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    lines += [
        f"| {name} | {' | '.join(f'{row[head]:.4f}' for head in heads)} |"
        for name, row in rows.items()
    ]
    return "\n".join(lines) + "\n"


def grouped(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The random removals as their mean and their range."""
    draws = [row for name, row in rows.items() if name.startswith("no random")]
    kinds = {"mean": np.mean, "least": np.min, "most": np.max}
    random = {
        f"no random, {kind}": {head: float(of([row[head] for row in draws])) for head in draws[0]}
        for kind, of in kinds.items()
    }
    rest = {name: row for name, row in rows.items() if not name.startswith("no random")}
    return {**rest, **random}


def figure(path: Path, worlds: Sequence[dict[str, Any]], rows: int = 2, hits: int = 3) -> None:
    """Generated images of each world, their first hits, and what becomes of them; a hit from the
    folder is a grey tile with its caption, for its picture may not be shown.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    gap = 0.15
    heads = {"generated": 1, "found by TID": hits, "found by TIDE": hits}
    heads |= {"tuned without\nthe planted 10": 1, "tuned without\n10 others": 1}
    widths: list[float] = []
    places: dict[str, int] = {}  # the first column of each
    for head, count in heads.items():
        places[head] = len(widths)
        widths += [1.0] * count + [gap]
    widths.pop()
    height, width = rows * len(worlds), sum(widths)
    drawing = plt.figure(figsize=(1.25 * width, 1.25 * height + 0.5))
    grid = drawing.add_gridspec(
        height, len(widths), width_ratios=widths, wspace=0.04, hspace=0.04,
        left=0.005, right=0.995, bottom=0.01, top=1 - 0.5 / (1.25 * height + 0.5),
    )  # fmt: skip

    def tile(row: int, column: int) -> Any:
        axis = drawing.add_subplot(grid[row, column])
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        return axis

    for number, one in enumerate(worlds):
        for place in range(rows):
            row = number * rows + place
            for (head, column), name in zip(
                [(head, column) for head, column in places.items() if "found" not in head],
                ("all", "no planted", "no random 0"),
                strict=True,
            ):
                axis = tile(row, column)
                axis.imshow(one["images"][name][place].permute(1, 2, 0).numpy())
                if not row:
                    axis.set_title(head, fontsize=10, loc="left")
            for head, name in (("found by TID", "TID"), ("found by TIDE", "TIDE")):
                best = one["scores"][name][place].topk(hits).indices.tolist()
                for step, item in enumerate(best):
                    axis = tile(row, places[head] + step)
                    if not row and not step:
                        axis.set_title(head, fontsize=10, loc="left")
                    if item >= HELD:
                        axis.imshow(one["planted"][item - HELD])
                        axis.spines[:].set(visible=True, color="tab:red", linewidth=2)
                    else:
                        axis.imshow(np.full((64, 64, 3), 200, np.uint8))
                        words = textwrap.fill(one["captions"][item], 16, max_lines=6)
                        axis.text(32, 32, words, fontsize=6, ha="center", va="center")
    drawing.savefig(path, dpi=90)
    plt.close(drawing)


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What was made before, or is made now and kept."""
    if not path.exists():
        draft = path.with_suffix(".draft")
        torch.save(make(), draft)
        draft.rename(path)
    return torch.load(path, weights_only=True)


def plant(
    name: str,
    held: tuple[list[Image.Image], list[str]],
    others: tuple[list[Image.Image], list[str]],
    scale: Scale,
    arguments: argparse.Namespace,
) -> None:
    """One picture: planted, generated, removed, attributed."""
    out, steps = arguments.out / name, 4 if arguments.smoke else STEPS
    out.mkdir(exist_ok=True)
    report = Report(out / "results.json", machine=machine(), picture=name, scale=asdict(scale))
    look_alikes = [look_alike(picture(name, arguments.pictures), n) for n in range(PLANTED)]
    captions = [caption.format(WORLDS[name]) for caption in CAPTIONS]
    train, prompt = ([*held[0], *look_alikes], [*held[1], *captions]), captions[0]
    pipe = world(arguments.out, *others, scale)

    def generate() -> dict[str, Any]:
        networks = tuned(pipe, train, out, scale)
        layers = get_peft_model_state_dict(networks["all"])
        finished(
            out / "lora",
            lambda draft: pipe.save_lora_weights(draft, unet_lora_layers=layers),
        )
        latents = {
            kind: generated(pipe, network, prompt, scale.queries, steps)
            for kind, network in networks.items()
        }
        images = {kind: decoded(pipe.vae, some) for kind, some in latents.items()}
        return {"latents": latents["all"], "images": images}

    made = kept(out / "generated.pt", generate)
    real = torch.stack([torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in look_alikes])
    effects = grouped(compared(made["images"], real.float() / 255))
    report.note(prompt=prompt, effects=effects)

    def attribute() -> Any:
        # as a user has it: a pipeline, and a LoRA from its file
        pipe = world(arguments.out, *others, scale)
        pipe.load_lora_weights(out / "lora")
        some = tuple(part[: 4 * len(train[0])] for part in others)
        return attributed(pipe, train, some, made["latents"], prompt, scale)

    scores, taken = kept(out / "scores.pt", attribute)
    ranks = {method: found(values) for method, values in scores.items()}
    report.note(ranks=ranks, seconds=taken)
    (out / "results.md").write_text(
        f"{prompt!r}, {scale.queries} images, {machine()}\n\n{table(ranks)}\n{table(effects)}"
    )


def draw(held: tuple[list[Image.Image], list[str]], arguments: argparse.Namespace) -> None:
    """The figure of what was made, where there is matplotlib."""
    worlds = []
    for name in arguments.worlds:
        made, (scores, _) = (
            torch.load(arguments.out / name / file, weights_only=True)
            for file in ("generated.pt", "scores.pt")
        )
        shown = picture(name, arguments.pictures)
        planted = [look_alike(shown, number) for number in range(PLANTED)]
        about = {"images": made["images"], "scores": scores}
        worlds.append({**about, "planted": planted, "captions": held[1]})
    figure(arguments.out / "figure.png", worlds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, required=True, help="with a metadata.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="everything is kept here")
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=["china"])
    parser.add_argument("--pictures", type=Path, help="with china.jpg and flower.jpg")
    parser.add_argument("--tuning-steps", type=int)
    parser.add_argument("--tuning-lr", type=float)
    parser.add_argument("--small", action="store_true", help="half an hour on two cores")
    parser.add_argument("--smoke", action="store_true", help="a minute on a CPU")
    parser.add_argument("--figure", action="store_true", help="only draw what is there")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    scale = SMOKE if arguments.smoke else SMALL if arguments.small else Scale()
    given = {name: getattr(arguments, name) for name in ("tuning_steps", "tuning_lr")}
    scale = replace(scale, **{name: value for name, value in given.items() if value is not None})
    images, captions = captioned(arguments.images, 300 if arguments.smoke else None)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
    held, others = (
        ([images[n] for n in places], [captions[n] for n in places])
        for places in (order[:HELD], order[HELD:])
    )
    for name in [] if arguments.figure else arguments.worlds:
        plant(name, held, others, scale, arguments)
    try:
        draw(held, arguments)
    except ImportError as error:
        print(f"no figure ({error}): run again with --figure where it can be drawn")


if __name__ == "__main__":
    main()
