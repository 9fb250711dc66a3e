"""What attribution while generating gives up against a search for the finished image, and what
closes the difference.

    python benchmarks/trace.py

Digits, on a CPU; trains for two minutes first, keeps that in trace-run/.

Agreement with `bank.search` of the finished images: Spearman correlation of the scores of all
training images, and the share of the top 2 % in common, mean over generated images. Ways are
compared with banks of 8 draws and of the sampler's own 18 levels.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wherefrom
from wherefrom.diffusion.streams import Taps
from wherefrom.tide.loss import shared_top, spearman

STEPS = 18


def standardised(scores: Tensor) -> Tensor:
    """Each row in standard deviations from its mean, so that two kinds of score can be added."""
    return (scores - scores.mean(1, keepdim=True)) / scores.std(1, keepdim=True)


class Recorder(Taps):
    """Every evaluation of a sampler: its noise level, the states' embeddings, and the clean image
    they stand for.
    """

    def __init__(self, tide: wherefrom.TIDE) -> None:
        super().__init__(tide.denoiser)
        self.tide, self.seen = tide, []  # type: wherefrom.TIDE, list[tuple[float, Tensor, Tensor]]

    def note(self, x_sigma: Tensor, sigma: Tensor, cond: Any, output: Tensor) -> None:
        streams, self.streams = self.streams, []
        estimate = self.tide.denoiser.process.clean(output, x_sigma, sigma)
        self.seen.append((float(sigma), self.tide.vectors(streams), estimate))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("trace-run"),
        help="where model, teacher and students are kept",
    )
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    arguments = parser.parse_args()
    settings, data = wherefrom.preset("digits"), wherefrom.data.digits()
    network = settings.train(data, store=arguments.folder / "model")
    denoiser = wherefrom.Denoiser(network, wherefrom.EDM())
    noise = torch.randn(arguments.images, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    rows = []
    for count in (8, STEPS):
        draws, kept = (
            wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), count),
            arguments.folder / f"{count} draws",
        )
        tid = wherefrom.TID(denoiser, draws).fit(data, samples=400, store=kept)
        tide = wherefrom.TIDE.distill(
            tid, data, 16, batch_size=64, lr=1e-3, dim=96, hidden=128, store=kept
        )
        bank = tide.index(data, dtype="float32")
        recorder = Recorder(tide)
        with wherefrom.diffusion.taps.listening(recorder), denoiser.watched(recorder.note):
            images = wherefrom.sample(denoiser, noise, steps=STEPS)
        exact = bank.scores(images)
        center = tide.embed(torch.stack([data[index] for index in range(0, len(data), 4)])).mean(
            0
        )  # [M, d]

        def states(
            centred: bool = False,
            bank: Any = bank,
            recorder: Any = recorder,
            draws: Any = draws,
            center: Tensor = center,
        ) -> Tensor:
            """The sampler's own evaluations, each against the bank's draw of the nearest level."""
            levels: dict[float, list[Tensor]] = {}
            for sigma, vectors, _ in recorder.seen:
                m = int((draws.sigmas.log() - torch.tensor(sigma).log()).abs().argmin())
                moved = vectors - vectors.mean(0) + center[m] if centred else vectors
                levels.setdefault(sigma, []).append(bank.at_draw(m, moved))
            return torch.stack([torch.stack(found).mean(0) for found in levels.values()]).mean(0)

        def settled(below: float, recorder: Any = recorder) -> tuple[float, Tensor]:
            """The first estimate of the clean images at a noise level below."""
            sigma, _, estimate = next(seen for seen in recorder.seen if seen[0] <= below)
            return sigma, estimate

        free = states()
        ways = {
            "the sampler's states alone": (0, free),
            "states, moved by their mean over the images": (0, states(True)),
        }
        for some in (1, 4):
            aligned = bank.scores(images, draws=some)
            ways[f"{some} aligned draws alone"] = (some, aligned)
            ways[f"states and {some} aligned draws"] = (
                some,
                standardised(free) + standardised(aligned),
            )
        for below in (1.0, 0.3, 0.1, 0.03):
            sigma, estimate = settled(below)
            ways[f"all aligned draws of the estimate at sigma {sigma:.2f}"] = (
                count,
                bank.scores(estimate),
            )
        for way, (extra, scores) in ways.items():
            agreement = spearman(scores, exact)
            row = {
                "draws": count,
                "way": way,
                "extra_evaluations": extra,
                "spearman": float(agreement.mean()),
            }
            rows.append(
                {
                    **row,
                    "least": float(agreement.min()),
                    "top_2_percent": float(shared_top(scores, exact).mean()),
                }
            )
            print(
                f"{count:3d} draws  {way:50s} + {extra:2d} evaluations  Spearman "
                f"{row['spearman']:.3f} "
                f"(least {rows[-1]['least']:.3f})  top 2 % {rows[-1]['top_2_percent']:.2f}",
                flush=True,
            )
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
