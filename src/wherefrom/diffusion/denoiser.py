"""A denoiser: a network together with its process, the only thing that the rest of the library
knows of a model.

It never changes the network: mode, flags, hooks, parameters and random state are afterwards what
they were before. Threads take turns at it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..artefacts.architecture import network_identity
from ..artefacts.identity import fingerprint
from ..data.batch import for_network, index_error
from ..data.items import Cond, map_cond
from ..errors import WherefromError
from ..layers.discovery import (
    check_gradients,
    choose_layers,
    find_blocks,
    find_layers,
    named,
    shared,
)
from ..layers.kinds import own_parameters
from ..layers.lora import running_adapters
from .calling import (
    Call,
    as_given,
    call_identity,
    call_plainly,
    check_network,
    checked_output,
    dtype_of,
)
from .draws import Draws
from .process import Process
from .pulse import noting
from .turns import modules_of, turn

Watcher = Callable[[Tensor, Tensor, Cond, Tensor], None]  # of x_sigma, sigma, cond and output
Made = Callable[[Tensor, Cond], None]  # of images and their condition
Layout = Literal["channels_first", "channels_last"]


class Coverage(NamedTuple):
    """How much of a network is tracked."""

    share: float  # of the parameters, 0 to 1
    left_out: dict[str, int]  # parameter name -> its number of elements

    def __str__(self) -> str:
        lines = [f"{100 * self.share:.2f} % of the parameters are tracked"]
        return "\n".join(
            lines + [f"  left out: {name} ({size:,})" for name, size in self.left_out.items()]
        )


class Denoiser:
    """`denoiser(x_sigma, sigma, cond)` gives the network's output in its process's
    parameterisation.

    Names may be patterns: `*` stops at dots, `**` crosses them.

    Args:
        network: any module.
        process: what the network predicts, and at which noise levels.
        call: `call(network, x_sigma, sigma, cond)` adapts any signature; sigma comes as [B]. By
            default the network is called as `network(x_sigma, sigma)`, with the condition as third
            argument where there is one.
        blocks: names of the modules whose outputs TIDE sums; None: found by itself. A dict says
            which element of a block's output is the image's: `{"blocks.*": 1}`; where text and
            image are one tensor [B, T, width], which positions: `{"blocks.*": slice(-256, None)}`.
        layers: names of the layers TID tracks. "lora": those of the active LoRA adapters of peft,
            `lora_A` and `lora_B`, and of their `modules_to_save`; an adapter that is fused or
            disabled, or no plain LoRA, is refused by name. "trainable": those whose parameters
            require gradients. None: "lora" where an adapter is active, else all linears and
            convolutions.
        exclude: names of layers and blocks that are left out, found or named.
        layout: where the blocks' outputs have their features; None: found by their shapes.
    """

    def __init__(
        self,
        network: nn.Module,
        process: Process,
        call: Call | None = None,
        blocks: Sequence[str] | Mapping[str, int | str | slice] | None = None,
        layers: Sequence[str] | Literal["lora", "trainable"] | None = None,
        exclude: Sequence[str] | None = None,
        *,
        layout: Layout | None = None,
    ) -> None:
        check_network(network)
        if not isinstance(process, Process):
            raise WherefromError(
                f"{process!r} is no process: give wherefrom.EDM(), DDPM, VPrediction or "
                "FlowMatching"
            )
        if call is not None and not callable(call):
            raise WherefromError(
                f"call is a function of network, x_sigma, sigma and cond, not {call!r}"
            )
        if layout not in (None, "channels_first", "channels_last"):
            raise WherefromError(
                f"layout is {layout!r}; choose 'channels_first' or 'channels_last'"
            )
        self.network, self.process, self.layout = network, process, layout
        self.call: Call = call or call_plainly
        self._excluded = {} if exclude is None else named(network, exclude, "exclude")
        self._elements = dict(blocks) if isinstance(blocks, Mapping) else {}
        self._blocks = None if blocks is None else named(network, list(blocks), "blocks")
        with turn(network):  # while somebody evaluates it, its flags are not its own
            self._layers, self._words, self.idle = choose_layers(network, layers, self._excluded)
            self._adapters = running_adapters(network)
        # what is tracked, by the caller or as that which was trained
        self.chosen = self._layers is not None or exclude is not None
        self._frozen_by = 0  # the thread, if any
        self._noted = False
        self._ran: set[str] | None = None  # layers that took part in a pass
        self._watchers: list[tuple[int, Watcher, Made | None]] = []

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The names of the modules whose outputs are the residual stream."""
        found = self._blocks or find_blocks(self.network)
        blocks = tuple(name for name in found if name not in self._excluded)
        if not blocks:
            raise WherefromError("exclude leaves no block: name others with blocks=[...]")
        return blocks

    @cached_property
    def elements(self) -> dict[str, int | str | slice]:
        """Which element of its output is the image's, of the blocks of which that was said."""
        patterns = self._blocks or {}
        return {name: self._elements[patterns[name]] for name in self.blocks if self._elements}

    @property
    def tapped(self) -> dict[str, Any]:
        """What the streams of its blocks depend on, beside the network."""
        said = {name: self.elements.get(name) for name in self.blocks}
        said = {name: repr(one) if isinstance(one, slice) else one for name, one in said.items()}
        return {"blocks": said, "layout": self.layout}

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The names of the tracked layers; modules that share their parameters are one layer."""
        return tuple(name for name, first in self.modules.items() if name == first)

    @property
    def tracks(self) -> str:
        """What is tracked, in words: "all 40 layers", "the LoRA adapter 'default': 32 layers"."""
        # an adapter's name may have braces
        return self._words.replace("{}", str(len(self.layers)))

    @cached_property
    def modules(self) -> dict[str, str]:
        """Every module whose gradients are tracked, and the layer it counts as: itself, or the
        first that has the same parameters.
        """
        found = find_layers(self.network) if self._layers is None else self._layers
        chosen = [name for name in found if name not in self._excluded]
        check_gradients(self.network, chosen)
        if not chosen:
            kind = type(self.network).__name__
            raise WherefromError(
                f"exclude leaves no layer of {kind} to track"
                if found
                else f"{kind} has no trainable linear layer or convolution: leave layers out to "
                "track the frozen ones"
                if "trainable" in self._words
                else f"{kind} has no linear layer and no convolution to track: for layers of other "
                "classes register a kind with wherefrom.layer_kind"
            )
        modules = shared(self.network, chosen)
        for name, first in modules.items():
            if name in self._excluded or first in self._excluded:
                raise WherefromError(
                    f"{name} and {first} share their parameters, and exclude names one of them: "
                    "leave out both, or none"
                )
        return modules

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        tensor = next(self.network.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the images that the network takes."""
        return dtype_of(self.network)

    def __call__(self, x_sigma: Tensor, sigma: Tensor | float, cond: Cond = None) -> Tensor:
        """The output at noised images x_sigma [B, C, H, W] and noise level sigma, [] or [B]: same
        shape as x_sigma.
        """
        level = self.process.check(sigma)
        with self.frozen(), self.noted():
            output = self.evaluate(x_sigma, self.sigma_for(x_sigma, level), cond)
        mine = threading.get_ident()
        for owner, watcher, _ in list(self._watchers):
            if owner == mine:
                watcher(x_sigma, level, cond, output)
        return output

    def evaluate(self, x_sigma: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """The network's output at sigma [B], checked; to be asked for inside `frozen`."""
        output = self.call(self.network, x_sigma, sigma, map_cond(cond, as_given))
        return checked_output(self.network, output, x_sigma)

    def placed(self, x: Tensor, cond: Cond) -> tuple[Tensor, Cond]:
        """A batch where the network is, in its precision, once it is clear that the network takes
        it.
        """
        return for_network(self.network, x, cond, directly=self.call is call_plainly)

    def check_adapters(self) -> None:
        """Refuse a network that runs other adapters than those that its layers were chosen for."""
        if running_adapters(self.network) != self._adapters:
            raise WherefromError(
                f"{type(self.network).__name__} does not run the adapters that it ran when the "
                "denoiser was made: put them back as they were, or make another wherefrom.Denoiser"
            )

    def check_draws(self, draws: Draws) -> None:
        """Refuse draws of another process."""
        if draws.process != self.process:
            raise WherefromError(
                f"the draws are of {draws.process!r}, the denoiser is of {self.process!r}: make "
                "them of one process"
            )

    @contextlib.contextmanager
    def watched(self, watcher: Watcher, made: Made | None = None) -> Iterator[None]:
        """Inside, `watcher` is told of every evaluation by this thread, once it is done, and `made`
        of the images that a sampler has made of them.
        """
        entry = (threading.get_ident(), watcher, made)
        self._watchers.append(entry)
        try:
            yield
        finally:
            self._watchers.remove(entry)

    def finished(self, images: Tensor, cond: Cond) -> None:
        """Tell who watches that a sampler is done."""
        for owner, _, made in list(self._watchers):
            if made is not None and owner == threading.get_ident():
                made(images, cond)

    def sigma_for(self, x_sigma: Tensor, sigma: Tensor | float) -> Tensor:
        """sigma as the network takes it: checked, one for each image, where the images are."""
        sigma = self.process.check(sigma)
        if sigma.ndim and len(sigma) != len(x_sigma):
            raise WherefromError(
                f"there are {len(x_sigma)} images and {len(sigma)} sigmas: give one, or one "
                "for each"
            )
        if sigma.is_floating_point():
            # a fractional timestep has more digits than half precision
            least = torch.float32 if self.process.discrete else x_sigma.dtype
            least = getattr(self.call, "sigma_dtype", least)
            sigma = sigma.to(torch.promote_types(x_sigma.dtype, least))
        if sigma.ndim == 0:  # filled in by the device, to which nothing is copied
            return torch.full(
                x_sigma.shape[:1], sigma.item(), dtype=sigma.dtype, device=x_sigma.device
            )
        return sigma.to(x_sigma.device, non_blocking=True)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """This thread's turn at the network: evaluation mode and no parameter gradients inside; on
        leaving, everything is what it was.
        """
        if self._frozen_by == threading.get_ident():
            yield
            return
        with turn(self.network):
            modules = modules_of(self.network)
            modes = [(module, module.training) for module in modules]
            flags = [
                (one, one.requires_grad)
                for module in modules
                for one in module._parameters.values()
                if one is not None
            ]
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices):
                try:
                    self._frozen_by = threading.get_ident()
                    _set(
                        [(module, False) for module in modules], [(one, False) for one, _ in flags]
                    )
                    yield
                except IndexError as error:
                    said = index_error(self.network, error)
                    if said is None:
                        raise
                    raise said from error
                finally:
                    self._frozen_by = 0
                    _set(modes, flags)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Around a pass inside `frozen`: the first time, what the network notes is looked at."""
        if self._noted:
            yield
            return
        self._noted = True
        with noting(self.network):
            yield

    def identity(self) -> dict[str, str]:
        """What all that is computed with this model depends on: its class, settings, weights and
        process, and how it is called, as short digests.
        """
        return {
            **network_identity(self.network),
            "process": fingerprint(self.process),
            "call": call_identity(self.call),
        }

    def ran(self, layers: set[str]) -> None:
        """Note that these layers took part in a pass."""
        self._ran = layers | (self._ran or set())

    @property
    def silent(self) -> tuple[str, ...]:
        """The tracked layers that took part in no pass so far; none before the first."""
        return () if self._ran is None else tuple(n for n in self.layers if n not in self._ran)

    def coverage(self) -> Coverage:
        """The share of the parameters that is tracked, and what is left out, by name.

        Before the first pass all tracked layers count; from then on those that are not silent.
        """
        silent, modules = self.silent, dict(self.network.named_modules())
        tracked = {
            id(parameter)
            for layer in self.layers
            if layer not in silent
            for parameter in own_parameters(modules[layer]).values()
        }
        given = dict(self.network.named_parameters())
        left_out = {name: one.numel() for name, one in given.items() if id(one) not in tracked}
        total = sum(parameter.numel() for parameter in given.values())
        return Coverage(1 - sum(left_out.values()) / total, left_out)


def _set(
    modes: Sequence[tuple[nn.Module, bool]], flags: Sequence[tuple[nn.Parameter, bool]]
) -> None:
    """Set what is not so already: a large network has thousands of modules, and most stay."""
    for module, mode in modes:
        if module.training != mode:
            module.training = mode
    for parameter, flag in flags:
        if parameter.requires_grad != flag:
            parameter.requires_grad_(flag)


def check_denoiser(denoiser: Any) -> None:
    """Refuse what is none, a network alone among it."""
    if isinstance(denoiser, Denoiser):
        return
    inside = isinstance(getattr(denoiser, "denoiser", None), Denoiser)
    raise WherefromError(
        f"the model is {type(denoiser).__name__}: "
        + ("give its denoiser, model.denoiser" if inside else "wrap the network as ")
        + ("" if inside else "wherefrom.Denoiser(network, process)")
    )


def check_model(denoiser: Any, draws: Any) -> None:
    """Refuse what is no denoiser, and draws that are none or of another process."""
    check_denoiser(denoiser)
    if not isinstance(draws, Draws):
        raise WherefromError(
            f"draws is {type(draws).__name__}: give wherefrom.Draws(process, shape, count)"
        )
    denoiser.check_draws(draws)
