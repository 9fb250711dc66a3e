"""One pass of a network with fake tensors: shapes and precisions of what its tracked layers see and
make, without a number computed or a byte of it held.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..data.items import Cond, map_cond
from ..diffusion.denoiser import Denoiser
from ..layers.kinds import kind_of
from .calls import given, hooked


class Seen:
    """The calls of tracked layers in a pass of one image."""

    def __init__(self) -> None:
        self.positions: defaultdict[str, int] = defaultdict(int)  # of every part that ran
        self.activations = 0  # bytes of inputs and of output gradients
        self.factors = 0  # numbers of all a and b
        self.failed = ""  # why the pass is not known, or empty
        self._inputs: dict[Any, Tensor] = {}

    def add(self, name: str, module: nn.Module, x: Tensor, output: Tensor) -> None:
        """Take a call of a layer."""
        kind = kind_of(module)
        assert kind is not None, name
        # layers beside each other, as of queries, keys and values, keep one input
        place = (x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride())
        self.activations += output.nbytes + (0 if place in self._inputs else x.nbytes)
        self._inputs[place] = x
        found = kind.factors(module, x, torch.empty_like(output))
        for part, (a, b) in zip(kind.parts(name, module), found, strict=True):
            self.positions[part.name] += b.shape[0] * b.shape[1]  # also those folded into rows
            self.factors += b.numel() + (0 if a is None else a.numel())


def fake_pass(denoiser: Denoiser, shape: tuple[int, ...], cond: Cond, dtype: torch.dtype) -> Seen:
    """What tracked layers see in a pass of one image; of a network whose way depends on numbers,
    which there are none of, only why it failed.
    """
    seen = Seen()
    try:
        _run(denoiser, shape, cond, dtype, seen)
    except Exception as error:  # whatever foreign code makes of tensors without numbers
        seen = Seen()
        said = str(error).strip().split("\n")[0]
        seen.failed = f"{type(error).__name__}{f', {said}' if said else ''}"
    return seen


def _run(
    denoiser: Denoiser, shape: tuple[int, ...], cond: Cond, dtype: torch.dtype, seen: Seen
) -> None:
    process, device = denoiser.process, _place(denoiser.device)
    level = process.check(process.grid(3)[1])
    number = level.item()  # fake tensors have none to ask for
    kind = level.dtype if process.discrete else denoiser.dtype
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with denoiser.frozen():
        network = _copied(denoiser.network, fake)
    with denoiser.frozen(), fake:
        x = torch.empty((1, *shape), dtype=denoiser.dtype, device=device)
        # a constant, of which fake tensors keep the number: networks may ask for it
        sigma = torch.tensor([number], dtype=kind, device=device)

        def one(value: Tensor) -> Tensor:
            dtype = denoiser.dtype if value.is_floating_point() else value.dtype
            return torch.empty((1, *value.shape[1:]), dtype=dtype, device=device)

        def entered(name: str) -> Callable[..., None]:
            layer = denoiser.modules[name]

            def hook(
                module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor
            ) -> None:
                if torch.is_grad_enabled():  # where not, the network says that it has no gradient
                    with torch.autocast(device.type, enabled=False):
                        seen.add(layer, module, given(layer, arguments, named), output)

            return hook

        with (
            hooked(_tracked(denoiser, network), entered),
            # `call`, or a forward that was exchanged, may lead to the network itself
            hooked(_tracked(denoiser, denoiser.network), entered),
            torch.enable_grad(),
            torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16),
        ):
            denoiser.call(network, x, sigma, map_cond(cond, one))
    if not seen.positions:
        raise RuntimeError("no tracked layer was called")


def _tracked(denoiser: Denoiser, network: nn.Module) -> dict[str, nn.Module]:
    modules = dict(network.named_modules())
    return {name: modules[name] for name in denoiser.modules}


def _place(device: torch.device) -> torch.device:
    """Where fake tensors say that they are: autocast knows no meta device."""
    return torch.device("cpu") if device.type == "meta" else device


def _copied(network: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """The network with fake weights. It is a copy, so that tables which it keeps for itself on its
    first pass, fake here, stay out of the network.
    """
    weights: dict[int, Any] = {}
    with fake:
        for one in (*network.parameters(), *network.buffers()):
            empty = torch.empty(one.shape, dtype=one.dtype, device=_place(one.device))
            parameter = isinstance(one, nn.Parameter)
            weights[id(one)] = nn.Parameter(empty, requires_grad=False) if parameter else empty
    # other tensors that it has are copied as they are: they may be asked for numbers
    return copy.deepcopy(network, weights).eval()
