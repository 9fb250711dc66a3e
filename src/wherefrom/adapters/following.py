"""A pipeline's own generation, followed: every call that it makes of its network and every step of
its scheduler, in the words of the process.

The network is heard by a hook, since only there are the noised latents, the timestep and the
condition what they truly are; the scheduler's step has the guided output and what it makes of it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data.items import Cond, cond_rows
from ..diffusion.denoiser import Denoiser
from ..diffusion.streams import Streams, Taps, listening
from ..diffusion.turns import has_turn
from ..errors import WherefromError, say
from .architecture import Adapter
from .scheduler import read_scheduler


class Evaluation(NamedTuple):
    """One evaluation of the network, with one row for each image: of a guided one the rows that
    have the condition.
    """

    sigma: Tensor  # []
    cond: Cond
    streams: Streams


class Finished(NamedTuple):
    """What was generated."""

    latents: Tensor  # [B, C, H, W]
    cond: Cond


class Following:
    """What a pipeline has done so far; `finished` is what its last step made."""

    def __init__(self, denoiser: Denoiser, taps: Taps, shape: tuple[int, ...]) -> None:
        assert isinstance(denoiser.call, Adapter)
        self.finished: Finished | None = None
        self.whole = True  # whether the last step was the last of the scheduler's
        self._made: Tensor | None = None  # of the last step, as the pipeline has it
        self._changed = self._said = False
        self._denoiser, self._adapter, self._taps, self._shape = (
            denoiser,
            denoiser.call,
            taps,
            shape,
        )
        self._call: tuple[Any, Mapping[str, Any], Streams] | None = None
        self._thread = threading.get_ident()

    def begins(self, module: Any, args: Any) -> None:
        """The network is about to be evaluated: nothing is left of a pass that failed."""
        if threading.get_ident() == self._thread:
            self._taps.streams = []

    def called(self, module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """The network was evaluated; of several times before a step the first one counts, which is
        the one with the condition.
        """
        if threading.get_ident() != self._thread:
            return
        streams, self._taps.streams = self._taps.streams, []
        if has_turn(module):
            return  # by this library: a search inside the trace
        self._call = self._call or (args, dict(kwargs), streams)

    def stepped(self, sample: Tensor, result: Tensor, perturbed: bool) -> Evaluation | None:
        """The scheduler has made `result` of `sample`; None where the network had no part in it.

        `perturbed`: the last rows of a call are images whose attention the pipeline perturbs.
        """
        call, self._call = self._call, None
        if call is None:
            return None
        args, kwargs, streams = call
        network, process = self._denoiser.network, self._denoiser.process
        heard = self._adapter.heard(network, args, kwargs, self._shape)
        batch = len(heard.x_sigma)
        rows = self._rows(heard.x_sigma, heard.cond, len(sample), perturbed)
        streams = [stream[rows] for stream in self._taps.check(streams, batch)]
        cond = cond_rows(heard.cond, rows)
        sample = sample[rows] if len(sample) == batch else sample
        self._changed = self._made is not None and not _nearly(self._made, sample)
        result = result[rows] if len(result) == batch else result
        self._made = result
        packing = self._adapter.row.packing
        latents = result if packing is None else packing.unpacked(network, result, self._shape)
        self.finished = Finished(latents, cond)
        # a sampler may begin where nothing of the image is left
        low, high = process.range
        return Evaluation(heard.sigma.clamp(low, high), cond, streams)

    def say_changed(self) -> None:
        """Warn where the pipeline stepped on with something else than its last step made."""
        if self._changed and not self._said:
            self._said = True
            say(
                "something changes the latents between the pipeline's steps, as a mask or a "
                "callback does: the hits are of what its last step makes; where that is changed, "
                "too, search with model.queries(latents, prompts)"
            )

    def _rows(self, x: Tensor, cond: Cond, images: int, perturbed: bool) -> slice:
        """The rows of a call that have the images' own condition."""
        batch, half = len(x), len(x) // 2
        if self._adapter.row.guidance == "null last":  # the scheduler gets both halves
            doubled = (
                batch == 2 * half and torch.equal(x[:half], x[half:]) and self._null(cond, half)
            )
            return slice(0, half if doubled else batch)
        own = batch - images * perturbed
        if own == images:
            return slice(0, images)
        if own == 2 * images:
            return slice(images, own)
        raise WherefromError(
            f"the pipeline evaluates {self._adapter.name} on {batch} rows for {images} images, and "
            "which of them have the condition is not known: trace it without that kind of guidance"
        )

    def _null(self, cond: Cond, half: int) -> bool:
        """Whether the second half of a batch has the class that stands for none."""
        assert isinstance(cond, dict)
        config: Any = self._denoiser.network.config
        return bool((cond["class_labels"][half:] == config.num_embeds_ada_norm).all())


def _network_of(pipe: Any, denoiser: Denoiser) -> None:
    """Refuse a pipeline that does not generate with the denoiser's network and process."""
    if not isinstance(denoiser.call, Adapter):
        raise WherefromError(
            "the bank's model was not made by wherefrom.from_pipeline, so how a pipeline calls it "
            "is not known: trace wherefrom.sample with its denoiser"
        )
    if not hasattr(pipe, "components") or not hasattr(pipe, "scheduler"):
        raise WherefromError(
            f"a trace follows a denoiser or a diffusers pipeline, not {type(pipe).__name__}"
        )
    if not any(one is denoiser.network for one in pipe.components.values()):
        raise WherefromError(
            f"{type(pipe).__name__} does not generate with the network that the bank was made "
            "with: trace the pipeline that the model was made of"
        )
    if not read_scheduler(pipe.scheduler).speaks_as(denoiser.call.schedule):
        raise WherefromError(
            f"the pipeline's {type(pipe.scheduler).__name__} is of another process than the "
            "bank's model: use a scheduler with the same configuration"
        )


@contextlib.contextmanager
def following(
    pipe: Any,
    denoiser: Denoiser,
    shape: tuple[int, ...],
    seen: Callable[[Evaluation], None],
) -> Iterator[Following]:
    """Inside, `seen` is told of every evaluation of the pipeline's network, at each step."""
    _network_of(pipe, denoiser)
    taps = Taps(denoiser, shape)
    followed = Following(denoiser, taps, shape)
    step = pipe.scheduler.step
    signature = inspect.signature(step)

    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        made = result[0] if isinstance(result, tuple) else result.prev_sample
        perturbed = bool(getattr(pipe, "do_perturbed_attention_guidance", False))
        evaluation = followed.stepped(given["sample"], made, perturbed)
        followed.whole = _is_last(pipe.scheduler, given["timestep"])
        if evaluation is not None:
            seen(evaluation)
            followed.say_changed()
        return result

    with contextlib.ExitStack() as stack:
        stack.enter_context(listening(taps))
        network = denoiser.network
        stack.callback(network.register_forward_pre_hook(followed.begins).remove)
        stack.callback(network.register_forward_hook(followed.called, with_kwargs=True).remove)
        own = vars(pipe.scheduler).get("step")
        stack.callback(_restored, pipe.scheduler, own)
        pipe.scheduler.step = watched
        yield followed


def _nearly(one: Tensor, other: Tensor) -> bool:
    alike = one.shape == other.shape
    return alike and torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-2)


def _is_last(scheduler: Any, timestep: Any) -> bool:
    """Whether a timestep is the last of those that the scheduler set."""
    return abs(float(scheduler.timesteps[-1]) - float(timestep)) < 1e-3


def _restored(scheduler: Any, own: Any) -> None:
    """A scheduler's step as it was: its class's, or one of its own."""
    if own is None:
        del scheduler.step
    else:
        scheduler.step = own
