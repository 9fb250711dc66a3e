"""What a model takes, in bytes, before anything runs: its curvature, a query, a training image; and
the refusal of what cannot fit.

Curvature and queries are arithmetic on the parts of its layers. What an image takes is read off one
pass of fake tensors, which have shapes and no numbers: a network on the meta device can be asked.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..data.items import Cond
from ..diffusion.denoiser import Denoiser, check_denoiser
from ..errors import WherefromError, whole
from ..layers.kinds import Part, kind_of
from ..running.memory import free_memory, shown
from .fake import Seen, fake_pass
from .kernel import choose
from .probe import Precision, Probe, in_bf16, reserved

_NAMED = 3  # patterns of layers that a refusal names, at most


@dataclass(frozen=True)
class Needs:
    """Bytes that TID takes of a model."""

    weights: int  # of the network, buffers included
    moments: int  # A and B of every part: on the device, and in the folder that keeps them
    roots: int  # of their inverses, beside them once they are fitted
    workspace: int  # while the largest of the roots is made
    query: int  # of a query at a draw, at most: draws come one after the other
    query_alone: int  # of one that is compared without others
    activations: int | None  # inputs and output gradients of the tracked layers, of one image
    image: int | None  # that one image of a batch is counted with
    unknown: str  # why the last two are not known beforehand, and None; else empty
    by_layer: Mapping[str, int]  # A, B and roots of every layer
    precision: torch.dtype  # of roots, queries and factors

    @property
    def fitting(self) -> int:
        """Of the curvature while it is fitted, at the most."""
        return self.moments + self.roots + self.workspace

    @property
    def fitted(self) -> int:
        """Of the curvature from then on."""
        return self.moments + self.roots

    def __str__(self) -> str:
        if self.activations is None or self.image is None:
            image = f"not known beforehand, as a pass without numbers fails: {self.unknown}"
        else:
            image = (
                f"{shown(self.activations)} of activations and output gradients; a batch is cut "
                f"as if it were {shown(self.image)}"
            )
        kind = str(self.precision)[6:]
        return "\n".join(
            [
                f"network:   {shown(self.weights)}",
                f"curvature: {shown(self.fitting)} at the end of the fit and {shown(self.fitted)} "
                f"from then on; A and B {shown(self.moments)}, roots ({kind}) {shown(self.roots)}",
                f"a query:   {shown(self.query)} at most, {shown(self.query_alone)} alone ({kind})",
                f"an image:  {image}",
            ]
        )


def needs(
    denoiser: Denoiser,
    shape: Sequence[int],
    cond: Cond = None,
    *,
    precision: Precision | None = None,
) -> Needs:
    """What TID takes of a model, in bytes, found without computing anything.

    Args:
        denoiser: the model; on the meta device it is counted as on a GPU.
        shape: of an image or latent, without the batch.
        cond: an example of a batch's conditions, of which only the form matters.
        precision: as for TID.
    """
    check_denoiser(denoiser)
    dtype = torch.bfloat16 if in_bf16(denoiser, precision) else denoiser.dtype
    return _needs(denoiser, tuple(whole("shape", size, 1) for size in shape), cond, dtype)


def _needs(denoiser: Denoiser, shape: tuple[int, ...], cond: Cond, dtype: torch.dtype) -> Needs:
    by_layer = _parts(denoiser)
    parts = [part for some in by_layer.values() for part in some]
    seen, width = fake_pass(denoiser, shape, cond, dtype), dtype.itemsize
    ran = [part for part in parts if seen.positions[part.name]] if seen.positions else parts
    largest = max((part.columns * part.outputs for part in ran), default=0) * width
    network = denoiser.network
    return Needs(
        weights=sum(one.nbytes for one in (*network.parameters(), *network.buffers())),
        moments=sum(moment_bytes(part, dtype) for part in parts),
        roots=sum(root_bytes(part, dtype) for part in parts),
        workspace=workspace_bytes(parts),
        query=sum(part.columns * part.outputs for part in parts) * width,
        query_alone=sum(_alone(part, seen) for part in ran) * width,
        activations=None if seen.failed else seen.activations,
        image=None if seen.failed else reserved(seen.factors * width, largest),
        unknown=seen.failed,
        by_layer={
            name: sum(moment_bytes(part, dtype) + root_bytes(part, dtype) for part in some)
            for name, some in by_layer.items()
        },
        precision=dtype,
    )


def _parts(denoiser: Denoiser) -> dict[str, list[Part]]:
    modules, found = dict(denoiser.network.named_modules()), {}
    for name in denoiser.layers:
        kind = kind_of(modules[name])
        assert kind is not None, name  # the denoiser names only layers that have a kind
        found[name] = kind.parts(name, modules[name])
    return found


def _alone(part: Part, seen: Seen) -> int:
    """Numbers that are kept of a part of one query which is compared without others."""
    positions = seen.positions[part.name]
    if seen.failed or choose(part, positions, 1) == "gradients":
        return part.columns * part.outputs
    return positions * (part.columns + part.outputs)


# --- the curvature --------------------------------------------------------------------------------


def moment_bytes(part: Part, dtype: torch.dtype) -> int:
    """Of the sums of a a^T and b b^T: full matrices, in float32 or better."""
    a = part.columns**2 if part.inputs else 0
    b = part.outputs if part.diagonal else part.outputs**2
    return (a + b) * torch.promote_types(dtype, torch.float32).itemsize


def root_bytes(part: Part, dtype: torch.dtype) -> int:
    """Of the roots of both inverses, whose rows are padded to a multiple of 8."""
    a = (part.columns + -part.columns % 8) * part.columns if part.inputs else 0
    b = part.outputs if part.diagonal else (part.outputs + -part.outputs % 8) * part.outputs
    return (a + b) * dtype.itemsize


def workspace_bytes(parts: Sequence[Part]) -> int:
    """While the largest root is made: a moment in float64, its Cholesky factor, the inverse of
    that, and as much again for the halves that it is put together from.
    """
    sides = [part.outputs for part in parts if not part.diagonal]
    sides += [part.columns for part in parts if part.inputs]
    return 4 * 8 * max(sides, default=0) ** 2


def check_curvature(probe: Probe) -> None:
    """Refuse a curvature that cannot fit into the memory that is free, before anything runs."""
    denoiser, dtype = probe.denoiser, probe.dtype
    _check_weights(denoiser)
    free, parts = free_memory(denoiser.device), _parts(denoiser)
    every = [part for some in parts.values() for part in some]
    wanted = {
        name: sum(moment_bytes(part, dtype) + root_bytes(part, dtype) for part in some)
        for name, some in parts.items()
    }
    workspace = workspace_bytes(every)
    total = sum(wanted.values()) + workspace
    sure = total
    if denoiser.device.type == "cpu":
        # pages that are never written are never taken: those above the diagonal of a sum, and of an
        # inverse until it is whole
        sure -= sum(moment_bytes(part, dtype) for part in every) // 2 + workspace // 8
    if sure > free:
        raise WherefromError(
            f"the curvature of {len(parts)} layers of {type(denoiser.network).__name__} takes "
            f"{shown(total)}, and {_free(denoiser, free)}: {way_out(wanted)}, or take "
            'TID(curvature="identity"), which needs none'
        )


def check_query(probe: Probe, cond: Cond, each: int | None = None) -> None:
    """Refuse queries of which not even one fits into the memory that is free, before anything runs;
    `each`: bytes of one, where they are known.
    """
    denoiser = probe.denoiser
    free = free_memory(denoiser.device)
    if (probe.query_bytes if each is None else each) <= free:
        return
    if each is None:  # where layers have few positions, less is kept
        found = _needs(denoiser, probe.draws.shape, cond, probe.dtype)
        each = 0 if found.unknown else found.query_alone
    if each > free:
        parts = _parts(denoiser)
        wanted = {
            name: sum(part.columns * part.outputs for part in some) * probe.dtype.itemsize
            for name, some in parts.items()
        }
        raise WherefromError(
            f"the gradients of one query, of {len(parts)} layers of "
            f"{type(denoiser.network).__name__}, take {shown(each)}, and "
            f"{_free(denoiser, free)}: {way_out(wanted)}"
        )


def _check_weights(denoiser: Denoiser) -> None:
    if denoiser.device.type == "meta":
        raise WherefromError(
            f"{type(denoiser.network).__name__} is on the meta device, where it has no weights: "
            "wherefrom.needs says what it takes; load its weights to run it"
        )


def _free(denoiser: Denoiser, free: int) -> str:
    place = "in main memory" if denoiser.device.type == "cpu" else f"on {denoiser.device}"
    return f"{shown(free)} are free {place}"


def way_out(wanted: Mapping[str, int]) -> str:
    """What to do about layers that take so many bytes each."""
    alike: defaultdict[str, int] = defaultdict(int)  # layers of one kind in all blocks, together
    for name, size in wanted.items():
        alike[re.sub(r"(?<![^.])\d+(?![^.])", "*", name)] += size
    dearest = sorted(alike, key=lambda pattern: -alike[pattern])[:_NAMED]
    if len(dearest) == len(alike):  # not all can be left out
        dearest = dearest[:1]
    share = shown(sum(alike[pattern] for pattern in dearest))
    return (
        'track a fine-tune alone with layers="lora" or "trainable", fewer layers with '
        f"layers=[...], or all but the dearest with exclude={dearest} ({share})"
    )
