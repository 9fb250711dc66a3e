"""Whether a layer is one of torch's own, and what may be wrong about one whose gradients are not
what its kind says.
"""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..errors import WherefromError


def believed(module: nn.Module) -> bool:
    """Whether a layer is one of torch's own, as torch made it."""
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and "forward" not in vars(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not is_parametrized(module)
    )


def none_of_its_kind(name: str, module: nn.Module, others: int = 0) -> WherefromError:
    """The sentence for a layer whose parameters have other gradients than its kind gives; `others`:
    how many more there are.
    """
    kind, more = type(module).__name__, f", and {others} more" if others else ""
    if is_parametrized(module):
        why = (
            "its weight is computed from other parameters; "
            "torch.nn.utils.parametrize.remove_parametrizations makes it plain"
        )
    elif hasattr(module, "weight_g"):
        why = "its weight is normalised; torch.nn.utils.remove_weight_norm makes it plain"
    elif hasattr(module, "weight_mask"):
        why = "its weight is pruned; torch.nn.utils.prune.remove makes it plain"
    elif believed(module):
        why = "its parameters are used outside of its call as well, as tied weights are"
    else:
        why = "it is more than the layer that it derives from, or its kind is not right for it"
    return WherefromError(
        f"the gradients of layer {name}, a {kind}{more}, cannot be told from its calls: {why}. "
        f"Leave it out with exclude=[{name!r}], or register its kind with wherefrom.layer_kind"
    )
