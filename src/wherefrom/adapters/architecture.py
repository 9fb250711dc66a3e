"""How one class of diffusers' networks is called: a row of plain data, and the call that is made of
it.

The row says which arguments are the condition, how latents become what the network takes, and what
of its blocks' outputs is the image's. `table.py` has the rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..artefacts.functions import function_fingerprint
from ..artefacts.identity import fingerprint
from ..data.items import Cond
from ..diffusion.denoiser import Layout
from ..errors import WherefromError
from .scheduler import Schedule

Config = Mapping[str, Any]
Shape = tuple[int, ...]
Elements = Mapping[str, int | slice]
Told = Callable[[nn.Module, Tensor, Mapping[str, Tensor]], dict[str, Any]]
Encode = Callable[[Any, Sequence[Any], tuple[int, ...]], dict[str, Tensor]]


def _nothing(network: nn.Module, x: Tensor, cond: Mapping[str, Tensor]) -> dict[str, Any]:
    return {}


def _patches(config: Mapping[str, Any]) -> Sequence[int]:
    patch = config.get("patch_size") or 1
    return (patch, patch) if isinstance(patch, int) else patch


class Packing(NamedTuple):
    """Latents as tokens, or with frames first, and back: `packed(network, x)` and
    `unpacked(network, tokens, shape)` with the shape of one item's latents; what is of another
    shape is given back as it is, and whoever asked refuses it.
    """

    packed: Callable[[nn.Module, Tensor], Tensor]
    unpacked: Callable[[nn.Module, Tensor, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class Architecture:
    """One row: all that tells a class of networks from the others.

    Attributes:
        shape: of one item's latents, from the network's config: (C, H, W), (C, F, H, W), (C, T).
        patches: how many latents in each direction the network takes at a time.
        conditions: the arguments of `forward` that are the condition.
        added: those of them that go inside `added_cond_kwargs`.
        dropped: masks of `encoder_hidden_states` that a pipeline does not give where they are ones.
        told: what else `forward` is told, from the network, the latents and the condition.
        ignored: arguments that `told` makes again; they must be what it makes.
        free: those of them that a generation may have otherwise than the items.
        packing: where the network takes tokens in place of latents, or frames before channels.
        still: whether its VAE takes an image as a video of one frame.
        clock: what the scheduler's timestep is multiplied by.
        typed: whether the timestep is of the latents' type, of which the network makes its own.
        variance: whether the output may have a second half of channels, the learned variance.
        blocks: patterns of the blocks, and which element of their output is the image's, or which
            positions; from the config and the latents' shape where it depends on them; None: found.
        layout: where blocks have their features; None: found.
        guidance: where a pipeline puts the null condition: the first or the last half of a doubled
            batch, or a call of its own.
        optional: whether the network may have no condition at all.
        encode: prompts or classes as conditions, from the pipeline, the texts and the size in
            pixels.
        encode_null: the same of what stands for no condition, where a pipeline encodes that
            otherwise than an empty prompt.
        null: the text or class that stands for no condition, from the pipeline; None: none does.
        zeroed: the conditions that are all zeros where there is no condition.
    """

    shape: Callable[[Mapping[str, Any]], tuple[int, ...]]
    patches: Callable[[Mapping[str, Any]], Sequence[int]] = _patches
    conditions: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    told: Told = _nothing
    ignored: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    packing: Packing | None = None
    still: bool = False
    clock: float = 1.0
    typed: bool = False
    variance: bool = False
    blocks: Elements | Sequence[str] | Callable[[Config, Shape], Elements] | None = None
    layout: Layout | None = None
    guidance: Literal["null first", "null last", "apart"] = "null first"
    optional: bool = False
    encode: Encode | None = None
    encode_null: Encode | None = None
    null: Callable[[Any], str | int | None] = field(default=lambda pipe: "")
    zeroed: tuple[str, ...] = ()


def _empty(value: Any) -> bool:
    """Whether an argument says nothing; the arguments of attention may have a LoRA's scale."""
    return isinstance(value, dict) and all(
        key == "scale" and one == 1 for key, one in value.items()
    )


def _alike(given: Any, made: Any) -> bool:
    """Whether arguments are the same, but for rounding."""
    if isinstance(made, tuple | list):
        return len(given) == len(made) and all(map(_alike, given, made))
    a, b = (torch.as_tensor(one).detach().to("cpu", torch.float32) for one in (given, made))
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, atol=1e-3)


class Heard(NamedTuple):
    """A call of the network by somebody else, in the words of its process."""

    x_sigma: Tensor  # [B, C, H, W]
    sigma: Tensor  # []
    cond: Cond


@dataclass(frozen=True)
class Adapter:
    """The `call` of a denoiser whose network is of a row: from x_sigma, sigma and cond to what the
    network takes, and from what it gives to the process's parameterisation.
    """

    name: str
    row: Architecture
    schedule: Schedule
    sigma_dtype: ClassVar[torch.dtype] = torch.float32  # timesteps of bfloat16 would be coarse

    def __call__(self, network: nn.Module, x_sigma: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        seen = self.schedule.network_input(x_sigma, sigma)
        timestep = self.schedule.timestep(sigma)
        timestep = timestep if self.row.clock == 1 else timestep * self.row.clock
        timestep = timestep.to(seen.dtype) if self.row.typed else timestep
        given = self._named(cond)
        added = {name: given.pop(name) for name in self.row.added if name in given}
        given |= {"added_cond_kwargs": added} if added else {}
        given |= self.row.told(network, seen, {**given, **added})
        packing, shape = self.row.packing, tuple(seen.shape[1:])
        tokens = seen if packing is None else packing.packed(network, seen)
        raw = network(tokens, timestep=timestep, return_dict=False, **given)[0]
        if packing is not None:
            raw = packing.unpacked(network, raw, shape)
        if self.row.variance and raw.shape[1] == 2 * seen.shape[1]:
            raw = raw[:, : seen.shape[1]]
        return self.schedule.output(raw, x_sigma, sigma)

    def _named(self, cond: Cond) -> dict[str, Any]:
        """A condition by the names of the network's arguments; one tensor is the first of them."""
        known = (*self.row.conditions, *self.row.added)
        if cond is None:
            if known and not self.row.optional:
                raise WherefromError(
                    f"{self.name} takes a condition, {known[0]!r}, and there is none: make items "
                    "with model.dataset or model.queries, or give pairs (latents, condition)"
                )
            return {}
        given = dict(cond) if isinstance(cond, dict) else dict(zip(known, [cond], strict=False))
        unknown = sorted(set(given) - set(known))
        if unknown or not given:
            takes = f"of the keys {', '.join(known)}" if known else "at all"
            raise WherefromError(
                f"{self.name} takes no condition "
                + (f"{unknown[0]!r}: give those " if known and unknown else "")
                + takes
            )
        return given

    def heard(
        self, network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], shape: Any
    ) -> Heard:
        """A call that somebody else made of the network, in the words of the process.

        `shape`: of one item's latents, as the bank has them.
        """
        # of the class: somebody may have put a function of their own in the method's place
        given = inspect.signature(type(network).forward).bind(network, *args, **kwargs).arguments
        given = {name: value for name, value in given.items() if value is not None}
        del given["self"]
        tokens = given.pop(next(iter(given)))
        timestep = torch.as_tensor(given.pop("timestep")) / self.row.clock
        added = {k: v for k, v in given.pop("added_cond_kwargs", {}).items() if v is not None}
        cond = {name: given.pop(name) for name in self.row.conditions if name in given}
        cond |= {name: added.pop(name) for name in self.row.added if name in added}
        for name in self.row.dropped:
            if name not in cond:
                cond[name] = cond["encoder_hidden_states"].new_ones(
                    cond["encoder_hidden_states"].shape[:2], dtype=torch.long
                )
        passed = {"return_dict", *self.row.ignored}
        strange = [
            name
            for name, value in {**given, **added}.items()
            if name not in passed and value is not False and not _empty(value)
        ]
        if strange:
            raise WherefromError(
                f"the pipeline gives {self.name} the argument {strange[0]!r}, which the items of "
                "the bank do not have: trace a pipeline that generates without it (a LoRA's scale "
                "is set with pipe.set_adapters before from_pipeline)"
            )
        packing = self.row.packing
        seen = tokens if packing is None else packing.unpacked(network, tokens, tuple(shape))
        if tuple(seen.shape[1:]) != tuple(shape):
            raise WherefromError(
                f"the pipeline generates latents of {tuple(seen.shape[1:])}, the bank's items are "
                f"{tuple(shape)}: generate at the size of the bank, or make the model with "
                "from_pipeline(pipe, size=...)"
            )
        told = self.row.told(network, seen, cond)
        for name in set(told).intersection(given, self.row.ignored).difference(self.row.free):
            if not _alike(given[name], told[name]):
                raise WherefromError(
                    f"the pipeline gives {self.name} {name!r} otherwise than the items of the bank "
                    "have it: generate at the size, or the frame rate, of the bank"
                )
        level = timestep.flatten()
        if not bool((level == level[0]).all()):
            raise WherefromError(
                f"the pipeline gives {self.name} a timestep for each part of an image: that "
                "cannot be traced"
            )
        sigma = self.schedule.sigma(level[0].cpu())
        return Heard(self.schedule.process_input(seen, sigma), sigma, cond or None)

    def fingerprint(self) -> str:
        """All that a call depends on beside the network."""
        functions = [self.row.told, *(self.row.packing or ()), type(self).__call__]
        row = self.row
        plain = (self.name, row.conditions, row.added, row.clock, row.variance, row.typed)
        written = [function_fingerprint(function) for function in functions]
        return fingerprint(repr(plain), written, repr(self.schedule))
