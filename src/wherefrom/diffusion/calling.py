"""How a network is called: the signature that it is given, what is refused of it, and what is
refused of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..artefacts.functions import function_fingerprint
from ..data.batch import leading
from ..data.items import Cond
from ..errors import WherefromError

Call = Callable[[nn.Module, Tensor, Tensor, Cond], Tensor]


def call_plainly(
    network: nn.Module, x_sigma: Tensor, sigma: Tensor, cond: Cond, **extra: Tensor
) -> Tensor:
    """The signature that needs no adapting: forward(x_sigma, sigma), with cond third where there is
    one.
    """
    return (
        network(x_sigma, sigma, **extra) if cond is None else network(x_sigma, sigma, cond, **extra)
    )


def call_identity(call: Call | None) -> str:
    """How a network is called, as a short digest; "plain" where nothing adapts it.

    A call that has `fingerprint()` says for itself what it computes.
    """
    own = getattr(call, "fingerprint", None)
    if callable(own):
        return str(own())
    return "plain" if call in (None, call_plainly) else function_fingerprint(call)


def as_given(condition: Tensor) -> Tensor:
    """A condition as it is given: whatever it was computed by is not part of the network."""
    return condition.clone() if condition.is_inference() else condition.detach()


def check_network(network: Any) -> None:
    """Refuse what cannot be evaluated and differentiated as it is."""
    if not isinstance(network, nn.Module):
        raise WherefromError(f"a denoiser wraps a torch.nn.Module, not {type(network).__name__}")
    for name, module in network.named_modules():
        # hooks of a compiled module are those that it was compiled with
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise WherefromError(
                f"{name or type(network).__name__} went through torch.compile, which does not "
                "let its layers be followed: give the network as it was before (`_orig_mod` of "
                "the compiled one); passes are compiled where that pays"
            )
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if is_lazy(tensor):
            raise WherefromError(
                f"{name} has no shape yet, as its lazy layer has never run: run the network once"
            )
        if tensor.is_inference():
            raise WherefromError(
                f"{name} was made inside torch.inference_mode and can take part in no gradient: "
                "make or load the network outside of it"
            )


def checked_output(network: nn.Module, output: Any, x_sigma: Tensor) -> Tensor:
    """A network's output, once it is clear that it is one number for each of x_sigma [B, ...]."""
    kind, wanted = type(network).__name__, tuple(x_sigma.shape)
    if isinstance(output, Tensor):
        if output.shape == x_sigma.shape:
            return output
        raise WherefromError(
            f"{kind} made {tuple(output.shape)} of {wanted}; an output has its input's shape: "
            "adapt the network with call="
        )
    inside: dict[Any, Any] = {}
    if isinstance(output, Mapping):
        inside = dict(output)
    elif isinstance(output, tuple | list):
        inside = dict(enumerate(output))
    fitting = [
        key for key, one in inside.items() if isinstance(one, Tensor) and one.shape == x_sigma.shape
    ]
    way = f"[{fitting[0]!r}]" if fitting else "..."
    raise WherefromError(
        f"{kind} returned {type(output).__name__}, not a tensor of shape {wanted}: adapt it with "
        f"call=lambda network, x, sigma, cond: network(x, sigma){way}"
    )


def dtype_of(network: nn.Module) -> torch.dtype:
    """Of the images that a network takes."""
    like = leading(network)
    return torch.get_default_dtype() if like is None else like.dtype
