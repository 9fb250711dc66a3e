"""A model with its training set and what was made of them, ready to be asked: what a page or a
command works on.

It speaks of pictures, class names and prompts; what these are to a network is its space's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..attribution.pictures import Metadata, Pictures
from ..data.items import Dataset
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..tid.index import Index
from ..tid.teacher import TID
from ..tide.bank import Bank
from .space import PixelSpace, Space

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass
class Bench:
    """All that is asked of a run.

    Attributes:
        name: of the run.
        denoiser: the model.
        dataset: its training items, in the network's space.
        pictures: what a person sees of them.
        draws: that images are compared on.
        collection: what a search goes through; None: nothing is indexed.
        tid: the exact method; None: nothing is fitted.
        classes: the names of the conditions, by number; None: there are no classes.
        prompts: whether conditions are texts.
        settings: of the run, as they are shown to people.
        space: between pictures and what the network works on.
    """

    name: str
    denoiser: Denoiser
    dataset: Dataset
    pictures: Pictures
    draws: Draws
    space: Space
    collection: Bank | Index | None = None
    tid: TID | None = None
    classes: list[str] | None = None
    prompts: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> Any:
        """What generates, for `collection.trace(bench.source)`: the denoiser, or the pipeline."""
        return self.space.source

    def query(self, image: Image, cond: str | int | None = None) -> Any:
        """A picture as one item that a search takes: `collection.search([bench.query(image)])`.

        cond: the prompt, the class by name or number, or None where the model takes none.
        """
        return self.space.query(image, cond)

    def sample(self, seed: int, cond: str | int | None = None) -> Tensor:
        """One generated item [1, C, H, W] in the network's space; a seed gives the same again."""
        return self.space.sample(seed, cond)

    def picture(self, x: Tensor) -> Image:
        """What a generated item [C, H, W] looks like; latents are decoded."""
        return self.space.picture(x)


def plain_bench(
    denoiser: Denoiser,
    dataset: Dataset,
    draws: Draws,
    *,
    name: str = "run",
    metadata: Metadata | None = None,
    collection: Bank | Index | None = None,
    tid: TID | None = None,
    classes: Sequence[str] | None = None,
    steps: int = 32,
    guidance: float = 1.0,
    settings: dict[str, Any] | None = None,
) -> Bench:
    """A bench of a network of pixels, as the built-in ones are.

    metadata: what else is known of the pictures.
    steps, guidance: of its sampler.
    """
    names = None if classes is None else list(classes)
    space = PixelSpace(denoiser, draws.shape, names, steps, guidance)
    return Bench(
        name,
        denoiser,
        dataset,
        Pictures(dataset, metadata),
        draws,
        space,
        collection,
        tid,
        names,
        settings=settings or {},
    )
