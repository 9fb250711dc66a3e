"""What was found of a model, in words: what `model.describe()` shows."""

from __future__ import annotations

from typing import Any

from ..data.items import Cond
from ..diffusion.denoiser import Denoiser
from ..errors import WherefromError
from ..factors.needs import needs
from .architecture import Adapter
from .latents import PipelineEncoder, scaling

_NAMED = 4  # blocks that are named, of many
_WORDS = {
    "index": "the timestep itself",
    "scaled": "{ticks:g} times the flow's time",
    "inverted": "{ticks:g} times what the flow's time is before 1",
    "log": "ln(sigma) / 4",
    "arctan": "atan(sigma) * 2 / pi",
    "sigma": "sigma itself",
}


class Shown(str):
    """A text that was shown already: a prompt that echoes results does not show it again."""

    def __repr__(self) -> str:
        return ""


def described(pipe: Any, denoiser: Denoiser, encoder: PipelineEncoder, shape: Any) -> str:
    """All that was found: one line for each thing, with its name in front."""
    network, cond = denoiser.network, _null(encoder)
    count = sum(parameter.numel() for parameter in network.parameters())
    lines = {
        "model": f"{_named(pipe)}{type(network).__name__}, {count / 1e6:,.1f} M parameters, "
        f"{str(denoiser.dtype)[6:]} on {denoiser.device}",
        "process": repr(denoiser.process),
        "timestep": _timestep(denoiser),
        "latents": _latents(encoder, shape),
        "conditions": _conditions(encoder, cond),
        "tracked": f"{denoiser.tracks}, {100 * denoiser.coverage().share:.2f} % of the parameters",
        "blocks": _blocks(denoiser),
    }
    said = [f"{name:<11}{text}" for name, text in lines.items()]
    memory = str(needs(denoiser, shape, cond)).split("\n")
    return "\n".join(
        [*said, *(f"{'memory' if not row else '':<11}{line}" for row, line in enumerate(memory))]
    )


def _named(pipe: Any) -> str:
    return f"{type(pipe).__name__}: " if hasattr(pipe, "config") else ""


def _timestep(denoiser: Denoiser) -> str:
    adapter = denoiser.call
    assert isinstance(adapter, Adapter)
    schedule, clock = adapter.schedule, adapter.row.clock
    ticks = schedule.ticks * clock
    words = _WORDS[schedule.clock].format(ticks=ticks).removeprefix("1 times ")
    beside = {"plain": "", "score": "; its output is the score"}
    wrapped = f"; {schedule.wrapping} between it and the process"
    return f"the network is told {words}{beside.get(schedule.wrapping, wrapped)}"


def _sized(size: Any) -> str:
    return " x ".join(map(str, size))


def _latents(encoder: PipelineEncoder, shape: Any) -> str:
    if encoder.vae is None:
        return f"{_sized(shape)}, as the network takes them: there is no VAE"
    mean, scale = (_number(value) for value in scaling(encoder.vae))
    made = f"{_sized(shape)} of {_sized(encoder.pixels)}: (mode - {mean}) * {scale}"
    return f"{made}, by {type(encoder.vae).__name__}"


def _number(value: Any) -> str:
    return f"{value.item():.5g}" if value.numel() == 1 else "one for each channel"


def _null(encoder: PipelineEncoder) -> Cond:
    """The null condition where there are encoders to make it."""
    try:
        return encoder.null()
    except WherefromError:
        return None


def _conditions(encoder: PipelineEncoder, cond: Cond) -> str:
    known = encoder.names
    if not known:
        return "none"
    if not isinstance(cond, dict):
        return f"{', '.join(known)}: nothing here encodes them, so items have them as tensors"
    shapes = [f"{name} {_sized(value.shape[1:]) or 'a number'}" for name, value in cond.items()]
    makers = [f"{name} ({type(one).__name__})" for name, one in encoder.encoders.items()]
    return (
        f"{', '.join(shapes)}"
        + (f", by {', '.join(makers)}" if makers else "")
        + f"; none is {encoder.nothing!r}"
    )


def _blocks(denoiser: Denoiser) -> str:
    try:
        names, elements = denoiser.blocks, denoiser.elements
    except WherefromError as error:
        return f"not found, so TIDE cannot be distilled: {error}"
    some = [
        f"{name}[{elements[name]}]" if name in elements else name
        for name in (names if len(names) <= _NAMED + 1 else (*names[:_NAMED], names[-1]))
    ]
    if len(names) > _NAMED + 1:
        some.insert(_NAMED, "...")
    return f"{len(names)} for TIDE: {', '.join(some)}"
