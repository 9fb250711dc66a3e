"""The space that a network works in, and the ways between it and what people have: pictures, class
names, prompts, seeds.

A network of pixels works on the picture itself, a diffusers pipeline mostly on latents.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..adapters.following import following
from ..adapters.model import Model
from ..data.decode import as_mode, decoding, resize_image, to_bytes, upright
from ..data.images import scaled
from ..data.lazy import crop
from ..diffusion.denoiser import Denoiser
from ..diffusion.sampling import sample
from ..errors import WherefromError, need, whole

if TYPE_CHECKING:
    from PIL.Image import Image

Asked = str | int | None  # a prompt, or a class by name or number
_SEEDS = 2**63 - 1
_DIGITS = 18  # of a class's number, at most


class Space(Protocol):
    """What a bench asks of the space of its network."""

    @property
    def source(self) -> Any:
        """What generates: a denoiser or a pipeline."""

    def query(self, image: Image, cond: Asked) -> Any:
        """A picture as an item x [C, H, W], or (x, condition)."""

    def sample(self, seed: int, cond: Asked) -> Tensor:
        """One generated item, [1, C, H, W]."""

    def picture(self, x: Tensor) -> Image:
        """What an item x [C, H, W] looks like."""


class PixelSpace:
    """Of a network that works on pixels in [-1, 1].

    Args:
        denoiser: the model.
        shape: of its images, [C, H, W] with 1 or 3 channels.
        classes: the names of its conditions, by number; None: it takes none.
        steps, guidance: of the sampler.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        shape: Sequence[int],
        classes: list[str] | None = None,
        steps: int = 32,
        guidance: float = 1.0,
    ) -> None:
        if len(shape) != 3 or shape[0] not in (1, 3):
            raise WherefromError(
                f"the network works on {tuple(shape)}: a picture is [C, H, W] of 1 or 3 channels"
            )
        self.source, self.shape, self.classes = denoiser, tuple(shape), classes
        self.steps, self.guidance = steps, guidance

    def query(self, image: Image, cond: Asked) -> Any:
        channels, *sides = self.shape
        size = sides[0], sides[1]
        with decoding("the picture"):
            seen = resize_image(as_mode(upright(image), channels, "the picture"), size)
            x = scaled(crop(to_bytes(seen), size, None))
        number = class_number(cond, self.classes)
        return x if number is None else (x, torch.tensor(number))

    def sample(self, seed: int, cond: Asked) -> Tensor:
        number = class_number(cond, self.classes)
        noise = torch.randn(1, *self.shape, generator=_seeded(seed))
        noise = noise.to(self.source.device, self.source.dtype)
        if number is None:
            return sample(self.source, noise, steps=self.steps)
        return sample(self.source, noise, torch.tensor([number]), self.steps, self.guidance)

    def picture(self, x: Tensor) -> Image:
        return shown(x)


class PipelineSpace:
    """Of a diffusers pipeline of images.

    Args:
        pipe: the pipeline.
        model: what `from_pipeline` found in it.
        classes: the names of its classes, by number; None: it has none.
        steps, guidance: of a generation; None: the pipeline's own.
    """

    def __init__(
        self,
        pipe: Any,
        model: Model,
        classes: list[str] | None = None,
        steps: int | None = None,
        guidance: float | None = None,
    ) -> None:
        if len(model.shape) != 3:
            raise WherefromError(
                f"{type(pipe).__name__} makes no pictures, and a run is of pictures: use "
                "wherefrom.from_pipeline in Python"
            )
        self.pipe, self.model, self.classes = pipe, model, classes
        self.steps, self.guidance = steps, guidance
        self._takes = inspect.signature(pipe.__call__).parameters
        # a pipeline that generates without its network's classes is sampled by the library
        alone = not {"prompt", "class_labels"} & set(self._takes)
        self._own = not (alone and model.encoder.names)

    @property
    def prompts(self) -> bool:
        """Whether conditions are texts."""
        return "prompt" in self._takes

    @property
    def source(self) -> Any:
        return self.pipe if self._own else self.model.denoiser

    def query(self, image: Image, cond: Asked) -> Any:
        return self.model.queries([image], self._condition(cond))[0]

    def _condition(self, cond: Asked) -> Asked:
        """As the pipeline takes it."""
        if not self.model.encoder.names:
            return class_number(cond, None)
        if not self.prompts:
            return class_number(cond, self.classes or [])
        if not isinstance(cond, str):
            raise WherefromError(
                f"{type(self.pipe).__name__} generates from a prompt: say which it is"
            )
        return cond

    def sample(self, seed: int, cond: Asked) -> Tensor:
        cond, generator = self._condition(cond), _seeded(seed)
        if not self._own:
            noise = torch.randn(1, *self.model.shape, generator=generator)
            noise = noise.to(self.source.device, self.source.dtype)
            given = self.model.encoder.conditions([cond])
            return sample(self.source, noise, given, self.steps or 32)
        size = dict(zip(("height", "width"), self.model.pixels, strict=True))
        wanted: dict[str, Any] = {"generator": generator, "output_type": "latent", **size}
        wanted |= {"prompt": cond, "class_labels": [cond], "batch_size": 1}
        wanted |= {"num_inference_steps": self.steps, "guidance_scale": self.guidance}
        given = {
            name: value
            for name, value in wanted.items()
            if name in self._takes and value is not None
        }
        self.pipe.set_progress_bar_config(disable=not sys.stderr.isatty())
        with following(self.pipe, self.model.denoiser, self.model.shape, _unheard) as followed:
            self.pipe(**given)
        assert followed.finished is not None
        return followed.finished.latents[:1].detach()

    def picture(self, x: Tensor) -> Image:
        return shown(self.model.encoder.decoded(x[None])[0])


def _unheard(_: Any) -> None:
    """Nobody asks what the evaluations were."""


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(whole("seed", seed, 0, _SEEDS))


def shown(x: Tensor) -> Image:
    """Pixels [C, H, W] in [-1, 1], C being 1 or 3, as a picture; what overshoots is cut."""
    pil: Any = need("PIL.Image", "data")
    pixels = x.detach().float().cpu().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
    array = pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)
    picture: Image = pil.fromarray(array.contiguous().numpy())
    return picture


def class_number(cond: Asked, classes: list[str] | None) -> int | None:
    """A class by its number; None where there are no classes. `cond`: its name or its number."""
    if classes is None:
        if cond is not None:
            raise WherefromError(f"this model takes no condition: leave {cond!r:.60} out")
        return None
    if cond is None:
        raise WherefromError(
            f"this model was trained with classes: say which of {few(classes)} it is"
        )
    if isinstance(cond, str) and cond in classes:
        return classes.index(cond)
    # Python refuses to read a number of thousands of digits
    digits = isinstance(cond, str) and cond.isdecimal() and len(cond) < _DIGITS
    number = int(cond) if digits else cond
    if isinstance(number, int) and (0 <= number < len(classes) or not classes):
        return number
    near = difflib.get_close_matches(str(cond)[:60], classes, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {few(classes)}"
    raise WherefromError(f"there is no class {cond!r:.60}: {hint}")


def few(classes: list[str]) -> str:
    """Some classes by name."""
    return ", ".join(classes[:12]) + (", ..." if len(classes) > 12 else "")
