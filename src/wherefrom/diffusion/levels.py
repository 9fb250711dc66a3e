"""Whether a network gives every image of a batch its own noise level, as all that mixes levels in a
batch relies on.

One that takes the first sigma, or branches by their mean, answers without an error, and wrongly.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ..data.items import Cond, map_cond
from ..errors import WherefromError
from .calling import Call, as_given, checked_output
from .denoiser import Denoiser
from .process import Process


class Levels:
    """A denoiser's answer to that question, asked for once."""

    def __init__(self, denoiser: Denoiser) -> None:
        self._denoiser, self._known = denoiser, False
        self._mixes: bool | None = None

    def check(self, x: Tensor, cond: Cond) -> None:
        """Refuse a network that takes one sigma for a whole batch; the first time it costs three
        evaluations of two images.
        """
        if self._known or not len(x):
            return
        denoiser = self._denoiser
        with denoiser.frozen(), denoiser.noted():
            _check(denoiser.network, denoiser.process, denoiser.call, x, cond)
        self._known = True

    def mix(self, x: Tensor, cond: Cond) -> bool:
        """Whether it does, for those who can do without."""
        if self._mixes is None and len(x):
            try:
                self.check(x, cond)
            except Exception:  # a network may refuse in words of its own
                self._mixes = False
            else:
                self._mixes = True
        return bool(self._mixes)


def check_learner(
    network: nn.Module,
    process: Process,
    call: Call,
    x: Tensor,
    cond: Cond,
    extra: Mapping[str, Tensor],
) -> None:
    """The same of a network that is about to be trained; `extra` is what it is told beside."""
    network = copy.deepcopy(network).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            # layers that begin at zero make any network indifferent to sigma
            if weight.is_floating_point() and not weight.any():
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    told = partial(call, **{name: value[[0, 0]] for name, value in extra.items()})
    _check(network, process, told, x, cond)


@torch.no_grad()
def _check(network: nn.Module, process: Process, call: Call, x: Tensor, cond: Cond) -> None:
    """Two copies of the first image of x [B, C, H, W], each at its own level, against both at the
    one and both at the other; nothing else differs, rounding included.
    """
    levels = process.grid(2)
    x, cond = x[[0, 0]], map_cond(cond, lambda value: as_given(value[[0, 0]]))
    noise = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(0)).to(x)
    x_sigma = process.add_noise(x, levels, noise.expand_as(x))
    levels = (levels if process.discrete else levels.to(x.dtype)).to(x.device)

    def output(*places: int) -> Tensor:
        # what is random inside the network is the same each time
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            made = call(network, x_sigma, levels[list(places)], cond)
        made = checked_output(network, made, x_sigma)
        return made.to(torch.promote_types(made.dtype, torch.float32))

    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        own = output(0, 1)
        alike = torch.stack([output(0, 0)[0], output(1, 1)[1]])
    tolerance = 0.05 if x.is_cuda or x.dtype.itemsize < 4 else 1e-3
    apart = (own - alike).flatten(1).norm(dim=1)
    if bool((apart > tolerance * alike.flatten(1).norm(dim=1)).any()):
        raise WherefromError(
            f"{type(network).__name__} takes one sigma for a whole batch, or lets an image's "
            "output depend on the sigmas of others, but its images have each their own: make "
            "call use all of sigma [B]"
        )
