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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wherefrom
from common import OUT, Report, machine
from wherefrom.attribution.agreement import shared_top, spearman
from wherefrom.diffusion.streams import Taps, listening

STEPS = 18
Ways = dict[str, tuple[int, Tensor]]  # by words: further evaluations of the network, and scores


def standardised(scores: Tensor) -> Tensor:
    """Each row in standard deviations from its mean, so that two kinds of score can be added."""
    return (scores - scores.mean(1, keepdim=True)) / scores.std(1, keepdim=True)


class Recorder:
    """Every evaluation of a sampler: its noise level, the states' embeddings, and the clean image
    they stand for.
    """

    def __init__(self, bank: wherefrom.Bank, tide: wherefrom.TIDE) -> None:
        self.bank, self.tide, self._taps = bank, tide, Taps(tide.denoiser, tide.draws.shape)
        self.seen: list[tuple[float, Tensor, Tensor]] = []

    @contextmanager
    def following(self) -> Iterator[None]:
        """Inside, every evaluation is recorded."""
        with listening(self._taps), self.tide.denoiser.watched(self._note):
            yield

    def _note(self, x_sigma: Tensor, sigma: Tensor, cond: Any, output: Tensor) -> None:
        streams, self._taps.streams = self._taps.streams, []
        estimate = self.tide.denoiser.process.clean(output, x_sigma, sigma)
        self.seen.append((float(sigma), self.tide.vectors(streams), estimate))

    def states(self, centre: Tensor | None = None) -> Tensor:
        """The sampler's own evaluations, each against the bank's draw of the nearest level; moved
        so that their mean over the images is that of a training set, `centre` [M, d].
        """
        levels: dict[float, list[Tensor]] = {}
        for sigma, vectors, _ in self.seen:
            away = self.tide.draws.sigmas.log() - torch.tensor(sigma).log()
            m = int(away.abs().argmin())
            if centre is not None:
                vectors = vectors - vectors.mean(0) + centre[m]
            levels.setdefault(sigma, []).append(self.bank.at_draw(m, vectors))
        return torch.stack([torch.stack(found).mean(0) for found in levels.values()]).mean(0)

    def settled(self, below: float) -> tuple[float, Tensor]:
        """The first estimate of the clean images at a noise level below."""
        sigma, _, estimate = next(seen for seen in self.seen if seen[0] <= below)
        return sigma, estimate


def ways(recorder: Recorder, images: Tensor, centre: Tensor) -> Ways:
    """Every way of attributing the images."""
    bank, free = recorder.bank, recorder.states()
    found: Ways = {
        "the sampler's states alone": (0, free),
        "states, moved by their mean over the images": (0, recorder.states(centre)),
    }
    for some in (1, 4):
        aligned = bank.scores(images, draws=some)
        both = standardised(free) + standardised(aligned)
        found[f"{some} aligned draws alone"] = some, aligned
        found[f"states and {some} aligned draws"] = some, both
    for below in (1.0, 0.3, 0.1, 0.03):
        sigma, estimate = recorder.settled(below)
        words = f"all aligned draws of the estimate at sigma {sigma:.2f}"
        found[words] = len(recorder.tide.draws), bank.scores(estimate)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("trace-run"),
        help="where model, teacher and students are kept",
    )
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--train-steps", type=int, help="of the model; none: the preset's")
    parser.add_argument("--epochs", type=float, default=16, help="of the distillations")
    parser.add_argument("--out", type=Path, help=OUT)
    arguments = parser.parse_args()
    settings, data = wherefrom.preset("digits"), wherefrom.data.digits()
    steps = {} if arguments.train_steps is None else {"steps": arguments.train_steps}
    network = settings.train(data, store=arguments.folder / "model", **steps)
    denoiser = wherefrom.Denoiser(network, wherefrom.EDM())
    noise = torch.randn(arguments.images, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    few = torch.stack([data[index] for index in range(0, len(data), 4)])
    how: dict[str, Any] = {"batch_size": 64, "lr": 1e-3, "dim": 96, "hidden": 128}
    report, rows = Report(arguments.out, machine=machine()), []
    for count in (8, STEPS):
        kept = arguments.folder / f"{count} draws"
        draws = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), count)
        tid = wherefrom.TID(denoiser, draws).fit(data, samples=400, store=kept / "teacher")
        student = {**how, **wherefrom.TIDE.PAPER, "store": kept / "student"}
        tide = wherefrom.TIDE.distill(tid, data, arguments.epochs, **student)
        bank = tide.index(data, dtype="float32")
        recorder = Recorder(bank, tide)
        with recorder.following():
            images = wherefrom.sample(denoiser, noise, steps=STEPS)
        exact = bank.scores(images)
        for way, (extra, scores) in ways(recorder, images, tide.embed(few).mean(0)).items():
            each, shared = spearman(scores, exact), float(shared_top(scores, exact).mean())
            mean, least = float(each.mean()), float(each.min())
            about = {"draws": count, "way": way, "extra_evaluations": extra}
            rows.append({**about, "spearman": mean, "least": least, "top_2_percent": shared})
            report.keep(rows=rows)
            print(
                f"{count:3d} draws  {way:50s} + {extra:2d} evaluations  Spearman {mean:.3f} "
                f"(least {least:.3f})  top 2 % {shared:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
