"""`wherefrom demo`: a model is trained on stamps, one that it generates is traced to the training
stamps behind it, and the claim is put to the test: without them the stamp is gone.

The folder is a run. Each stage keeps what it made there, so a second run, or one after an
interruption, repeats nothing.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from .. import __version__
from ..artefacts.files import exists, save_json
from ..attribution.result import Attribution
from ..data.stamps import COPIED, Stamps, stamps
from ..errors import WherefromError
from ..evaluation.similarity import MSE, to_unit
from ..report.story import Again, story
from ..running.progress import clock
from ..runs.beginning import begin
from ..runs.run import Run
from ..runs.subject import Subject
from ..runs.toml import NAME

MOTIF = "star"  # what is generated
COUNT = 12  # images to generate
REMOVED = 50  # training images that are found, and left out
TOLD = 4  # generated images that the report is of
DRAWS = 4
SAMPLES = 400  # training images that estimate the curvature
SAME, OTHER = 0.08, 0.15  # difference up to which a stamp is the same, from which another


def run_demo(out: Path, seed: int) -> None:
    """Train, generate, attribute, test what was found, write down."""
    console = Console(highlight=False, soft_wrap=True)
    clocks, shown = _Clock(), escape(str(out))
    run = _opened(out, seed)
    dataset = stamps()
    artists = len(set(dataset.columns["artist"]))
    console.print(
        f"[bold]1. Training[/] a small diffusion transformer on {len(dataset):,} stamps by "
        f"{artists} artists"
    )
    with clocks.timing("training"):
        run.train()

    console.print(f"[bold]2. Generating[/] {COUNT} stamps: each a {MOTIF}, each from other noise")
    with clocks.timing("generating"):
        seeds = range(COUNT * seed, COUNT * (seed + 1))
        paths = list(run.generate(seeds, MOTIF))
        images = _generated(run.subject, seeds)

    console.print(f"[bold]3. Attributing[/] them: which {REMOVED} training stamps made each?")
    with clocks.timing("attributing"):
        kept = run.attribute(paths, top_k=REMOVED)
    case = _chosen(kept.hits, dataset)
    console.print(f"   {case.said(dataset, paths[case.image].name)}")

    console.print(
        f"[bold]4. Testing[/] that: the network is trained again without these {REMOVED}, and "
        f"again without {REMOVED} others\n   taken at random; its first weights, the order of the "
        "stamps and all noise stay the same"
    )
    others = _others(case.found, len(dataset), seed)
    with clocks.timing("retraining without those found"):
        without_found = _generated(run.without(case.found), seeds)
    with clocks.timing("retraining without others"):
        without_others = _generated(run.without(others), seeds)
    moved = [_difference(images, again) for again in (without_found, without_others)]  # each [Q]
    by_found, by_others = (float(row[case.image]) for row in moved)
    console.print(
        f"   without the {REMOVED} found, the same noise {_became(by_found)}\n"
        f"   without {REMOVED} others, it {_became(by_others)}\n"
        f"   {_verdict(by_found, by_others)}"
    )

    console.print(f"[bold]5. Writing[/] what was found to {shown}/")
    order, kin = _order(kept.hits, case)
    story(
        out / "attribution.png",
        f"Which of {len(dataset):,} training stamps made this one?",
        f"the {REMOVED} found for it: {case.shown}",
        torch.stack([dataset[index][0] for index in case.found]),
        "Was it these? Train again without them, and start from the same noise",
        [
            Again(f"trained on\nall {len(dataset):,}", images[order], ""),
            Again(
                f"trained without\nthe {REMOVED} found", without_found[order], _outcome(by_found)
            ),
            Again(f"trained without\n{REMOVED} others", without_others[order], _outcome(by_others)),
        ],
        kin,
    )
    told = order[:TOLD]
    _some(kept.hits, told).report(
        out / "report.html",
        run.pictures,
        images[told].clamp(-1, 1),  # as they were written, and attributed
        group="artist",
        names=[paths[place].name for place in told],
        title="Which training stamps made these?",
        model=run.subject.denoiser,
    )
    about = {
        "image": case.image,
        "file": paths[case.image].name,
        "generated_from": {"motif": MOTIF, "seeds": list(seeds)},
        "found": case.found,
        "artists_of_the_found": case.artists,
        "planted_found": len(set(case.found) & set(dataset.copies)),
        "left_out_at_random": others,
        "difference": {"without_found": moved[0].tolist(), "without_others": moved[1].tolist()},
        "held": _held(by_found, by_others),
        "seconds": clocks.seconds,
        "versions": {
            "wherefrom": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    save_json(out / "demo.json", about)
    console.print()
    for name, words in (
        ("attribution.png", "the story in one picture"),
        ("report.html", f"that stamp and {TOLD - 1} more, what was found, and totals by artist"),
        ("demo.json", "the same in numbers"),
        ("generated", "the generated stamps"),
    ):
        console.print(f"   {escape(str(out / name))}  {words}")
    console.print(f"\n   {clock(sum(clocks.seconds.values()))} in all")
    console.print(f"   ask about more of them on a page: [bold]wherefrom serve {shown}[/]")


def _opened(out: Path, seed: int) -> Run:
    """The run of a folder, begun where there is none."""
    if not exists(out / NAME):
        model, data = {"preset": "stamps", "seed": seed}, {"dataset": "stamps", "labels": True}
        how = {"draws": {"count": DRAWS}, "tid": {"samples": SAMPLES}}
        begin(out, {"model": model, "data": data, **how})
    run = Run.open(out, device="cpu")
    of = run.settings.model
    if of.preset != "stamps" or of.seed != seed:
        raise WherefromError(
            f"{out} holds another run, of {of.preset or 'another model'} with seed {of.seed}: give "
            "--out a new folder"
        )
    return run


def _generated(subject: Subject, seeds: range) -> Tensor:
    """What a network makes of the noise of these seeds, [Q, C, H, W]."""
    return torch.cat([subject.space.sample(seed, MOTIF) for seed in seeds])


@dataclass(frozen=True)
class _Case:
    """The generated image that is looked into."""

    image: int
    found: list[int]
    artists: dict[str, int]  # how many of the found are whose, most first

    @property
    def shown(self) -> str:
        """Whose the found ones are."""
        return ", ".join(f"{count} by {artist}" for artist, count in self.artists.items())

    def said(self, dataset: Stamps, name: str) -> str:
        """What was found for the image of this name, and whether it is known to be right."""
        artist, count = next(iter(self.artists.items()))
        drawn = dataset.columns["artist"].count(artist)
        said = (
            f"{name} leads to one artist most of all: of the {len(self.found)} found for it\n   "
            f"{count} are by {artist}, who drew {drawn} of the {len(dataset):,}"
        )
        if artist != COPIED:
            return said
        return (
            f"{said}. Those {drawn} are planted, near-copies of one\n   stamp: {count} of the "
            f"{drawn} right answers were found"
        )


def _chosen(hits: Attribution, dataset: Stamps) -> _Case:
    """The image for which the largest share of all that one artist drew was found."""
    artists = dataset.columns["artist"]
    drawn, rows = Counter(artists), hits.indices.tolist()
    counts = [Counter(artists[index] for index in row) for row in rows]

    def share(place: int) -> float:
        return max(count / drawn[artist] for artist, count in counts[place].items())

    image = max(range(len(rows)), key=share)
    return _Case(image, rows[image], dict(counts[image].most_common()))


def _others(found: list[int], count: int, seed: int) -> list[int]:
    """As many others, at random."""
    rest = sorted(set(range(count)) - set(found))
    order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))
    return [rest[place] for place in order[: len(found)].tolist()]


def _difference(images: Tensor, again: Tensor) -> Tensor:
    """How far images [Q, C, H, W] are from those of another network, [Q]: the root of the mean
    squared difference of their pixels, of 1.
    """
    return (1 - MSE()(to_unit(images), to_unit(again))).sqrt()


def _order(hits: Attribution, case: _Case) -> tuple[list[int], int]:
    """The image in question first, then those that share most of what was found for it; and how
    many these are.
    """
    shared = [len(set(row) & set(case.found)) for row in hits.indices.tolist()]
    others = [place for place in range(len(shared)) if place != case.image]
    others.sort(key=lambda place: -shared[place])
    kin = sum(2 * shared[place] > len(case.found) for place in others)
    return [case.image, *others], kin


def _some(hits: Attribution, queries: list[int]) -> Attribution:
    """The hits of some queries, in this order."""
    tensors = {one.name: getattr(hits, one.name) for one in fields(hits) if one.name != "about"}
    return replace(hits, **{name: tensor[queries] for name, tensor in tensors.items()})


# --- in words -------------------------------------------------------------------------------------


def _became(difference: float) -> str:
    what = {"stays": "gives the same stamp", "is gone": "gives another stamp"}
    said = what.get(_fate(difference), "gives a stamp that is partly the same")
    return f"{said} (they differ by {100 * difference:.0f} %)"


def _fate(difference: float) -> str:
    return "stays" if difference <= SAME else "is gone" if difference >= OTHER else "has changed"


def _outcome(difference: float) -> str:
    return f"it {_fate(difference)}"


def _held(by_found: float, by_others: float) -> bool:
    return _fate(by_found) == "is gone" and _fate(by_others) == "stays"


def _verdict(by_found: float, by_others: float) -> str:
    if _held(by_found, by_others):
        return "So it is these that made it, and not just any."
    if by_found > 2 * by_others:
        return "Not as clear as it can be, though those found matter more than others do."
    return "This time the test speaks against what was found: others matter as much."


class _Clock:
    """How long each stage took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[stage] = round(time.monotonic() - started, 2)
