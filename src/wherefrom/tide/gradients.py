"""The gradients of a step as all processes have them: added up in one exchange, with the loss and
with the wishes to stop and to keep what there is.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..running.ranks import gathered
from ..running.watch import Watch


class Gradients:
    """Those of some parameters, of a loss of which each process has differentiated its part.

    Args:
        parameters: the same in all processes.
        watch: on the others.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], watch: Watch) -> None:
        self._watch, self._all = watch, list(parameters)
        self._learning: list[nn.Parameter] | None = None  # those of them that have a gradient

    def shared(self, loss: Tensor, stop: bool, keep: bool) -> tuple[Tensor, bool, bool]:
        """The whole loss, and whether anybody wants to stop, or to keep what there is; now every
        process has the whole gradient, the same to the bit.
        """
        if not self._watch.here.joined:
            return loss, stop, keep
        if self._learning is None:
            # what nothing depends on has none; only the first is sure to have had a draw
            found = gathered([one.grad is not None for one in self._all], self._watch.what)[0]
            self._learning = [one for one, has in zip(self._all, found, strict=True) if has]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._learning]
        parts += [loss, torch.full_like(loss, stop), torch.full_like(loss, keep)]
        # one exchange a step, in float32: rounding is that of the gradients themselves
        flat = torch.cat([part.flatten() for part in parts])
        self._watch.summed(flat)
        *gradients, whole, stops, keeps = flat.split([part.numel() for part in parts])
        for parameter, gradient in zip(self._learning, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        return whole[0], bool(stops), bool(keeps)
