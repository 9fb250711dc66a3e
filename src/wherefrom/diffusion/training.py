"""Training a network under a process: AdamW, warm-up and a moving average of the weights.

On the CPU the same call gives the same weights to the last bit, with the same number of threads.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..artefacts.architecture import network_identity
from ..artefacts.artefact import Folder
from ..artefacts.checkpoint import Checkpoint
from ..artefacts.identity import fingerprint
from ..data.fingerprint import data_fingerprint
from ..data.items import Cond, Dataset, length
from ..errors import WherefromError
from ..running.modes import outside_inference
from .batches import Feed, Order, device_of, kept_indices
from .calling import Call, call_identity, call_plainly, checked_output, dtype_of
from .levels import check_learner
from .process import Process
from .run import Noised, Run, Settings, run_steps
from .turns import turn


@outside_inference
def train(
    network: nn.Module,
    process: Process,
    dataset: Dataset,
    steps: int,
    batch_size: int,
    lr: float,
    ema: float = 0.999,
    seed: int = 0,
    keep: Iterable[int] | Tensor | None = None,
    coupled: bool = True,
    store: Folder | None = None,
    *,
    warmup: int | None = None,
    decay: int = 0,
    weight_decay: float = 0.01,
    flip: bool = False,
    augment: float = 0.0,
    call: Call | None = None,
    compile: bool | None = None,
) -> nn.Module:
    """Train a copy of `network` and return its moving average; `network` itself stays as it is, the
    starting point.

    Args:
        network: any module, on the device to train on; its weights are where training starts.
        process: what the network predicts, and at which noise levels.
        dataset: items x or (x, cond).
        steps, batch_size, lr: how long, how many images a step, peak learning rate.
        ema: decay of the average, at every step from the first.
        seed: of batch order, noise and dropout.
        keep: the training indices that may be used; None: all.
        coupled: with `keep`, share batches, noise, flips and dropout with the run that keeps
            everything, so that the two differ only by what was left out.
        store: a folder for checkpoints. A run that was interrupted goes on from there, a finished
            one is returned at once; from other initial weights it is another run, and refused.
        warmup: steps of linear warm-up; None: a twentieth of the run, as in the paper.
        decay: last steps, over which the learning rate falls to 0; in the paper none. Such a run
            cannot be made longer.
        weight_decay: of AdamW, on all parameters.
        flip: mirror images at random.
        augment: probability of each of EDM's geometric augmentations; the network is told by
            `augmented=`, a [B] tensor.
        call: `call(network, x_sigma, sigma, cond)` adapts any signature.
        compile: run the network through torch.compile; None: on CUDA.
    """
    check_trainable(network, process)
    settings = Settings(
        steps, batch_size, lr, ema, seed, coupled, warmup, decay, weight_decay, flip, augment
    )
    if augment:
        check_takes_bit(network, call)
    count = length(dataset)
    kept = kept_indices(keep, count)
    check_enough(kept, count, batch_size)
    device = device_of(network)
    with turn(network):  # while somebody evaluates it, its flags are not its own
        model, average = copied(network).train(), copied(network).eval()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WherefromError(f"{type(network).__name__} has no parameter to train: all are frozen")
    forward = call or call_plainly
    if device.type == "cuda" if compile is None else compile:
        forward = _compiled(forward)
    run = Alone(model, average, process, settings, call or call_plainly, forward, device)
    checkpoint, start = None, 0
    if store is not None:
        all_kept = kept is None or len(kept) == count
        identity = {
            **start_identity(network, process, call),
            "data": data_fingerprint(dataset),
            "keep": None if all_kept else fingerprint(kept),
            **settings.identity(),
        }
        networks = {"network": model, "average": average}
        checkpoint = Checkpoint(store, "training", networks, run.optimizer, identity)
        start = resumed(checkpoint, steps)
    if start < steps:
        rest = range(start, steps)
        feed = Feed(dataset, Order(count, batch_size, seed, kept, coupled), model, call is None)
        run_steps(run, _one_network(feed.batches(rest)), rest, checkpoint, "training")
    return average


class Alone(Run):
    """The run of one network."""

    def __init__(
        self,
        model: nn.Module,
        average: nn.Module,
        process: Process,
        settings: Settings,
        call: Call,
        forward: Callable[..., Tensor],
        device: torch.device,
    ) -> None:
        trained, averaged = list(model.parameters()), list(average.parameters())
        super().__init__(model, trained, averaged, process, settings, device, dtype_of(model))
        self._average, self._call, self._forward = average, call, forward

    def check(self, noised: Noised, cond: Cond) -> None:
        x, extra = noised.x_sigma[0], noised.extra
        check_learner(self.model, self.process, self._call, x, cond, extra)

    def outputs(self, noised: Noised, cond: Cond) -> Tensor:
        x_sigma = noised.x_sigma[0]
        output = self._forward(self.model, x_sigma, noised.sigma, cond, **noised.extra)
        return checked_output(self.model, output, x_sigma)[None]

    def settle(self) -> None:
        """Buffers are not averaged: the average takes the newest."""
        for mine, newest in zip(self._average.buffers(), self.model.buffers(), strict=True):
            mine.copy_(newest)


def _one_network(batches: Iterable[tuple[Tensor, Cond]]) -> Iterator[tuple[Tensor, Cond]]:
    for x, cond in batches:
        yield x[None], cond


def start_identity(network: nn.Module, process: Process, call: Call | None) -> dict[str, str]:
    """Where a training starts: the network with its initial weights and those of them that learn,
    its process, and how it is called.
    """
    start = network_identity(network)
    learning = [name for name, weight in network.named_parameters() if weight.requires_grad]
    return {
        "network": start["network"],
        "architecture": start["architecture"],
        "initial_weights": start["weights"],
        "learning": fingerprint(learning),
        "process": fingerprint(process),
        "call": call_identity(call),
    }


def copied(network: nn.Module) -> nn.Module:
    """A copy of a network, or the sentence for one that cannot be copied."""
    try:
        return copy.deepcopy(network)
    except RuntimeError as error:
        if "deepcopy" not in str(error):
            raise
        raise WherefromError(
            f"{type(network).__name__} holds a tensor with a history and cannot be copied, as "
            "torch.nn.utils.weight_norm leaves it: use torch.nn.utils.parametrizations.weight_norm"
        ) from error


def resumed(checkpoint: Checkpoint, steps: int) -> int:
    """Take up a run where it is; how many of its steps are done."""
    checkpoint.restore()
    if checkpoint.step > steps:
        raise WherefromError(
            f"the run in {checkpoint.artefact.folder} is already {checkpoint.step} steps long, not "
            f"{steps}; choose another folder"
        )
    return checkpoint.step


def check_trainable(network: Any, process: Any) -> None:
    """Refuse what is no network or no process."""
    if not isinstance(network, nn.Module):
        raise WherefromError(f"what is trained is a torch.nn.Module, not {type(network).__name__}")
    if not isinstance(process, Process):
        raise WherefromError(
            f"{process!r} is no process: give wherefrom.EDM(), DDPM, VPrediction or FlowMatching"
        )


def check_enough(kept: Tensor | None, count: int, batch_size: int) -> None:
    """Refuse batches that are larger than the images there are."""
    usable = count if kept is None else len(kept)
    if batch_size > usable:
        which = "the data set has only" if kept is None else f"keep leaves only {usable} of"
        raise WherefromError(
            f"a batch of {batch_size} cannot be drawn: {which} {count} items; lower batch_size"
        )


def check_takes_bit(network: nn.Module, call: Call | None) -> None:
    """Refuse to augment for a network that cannot be told of it."""
    parameters = inspect.signature(call or network.forward).parameters
    if "augmented" not in parameters and not any(
        p.kind is p.VAR_KEYWORD for p in parameters.values()
    ):
        raise WherefromError(
            "augment needs a network that is told of it: give "
            f"{type(network).__name__}.forward an argument `augmented`"
        )


def _compiled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(forward)
