"""The whole of TID in plain autograd, one sample at a time: slow, short, and the oracle that every
fast path is tested against.

Read it beside the paper: the functions stand in the order of its equations. Layers are taken apart
by calling them on parts of their input, not by the formulas that the fast path uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data.items import Cond, Dataset, map_cond, split
from .diffusion.denoiser import Denoiser
from .diffusion.draws import Draw, Draws, independent_draw, resampled_cotangent
from .diffusion.process import Process

LayerFactors = list[tuple[str, Tensor, Tensor]]  # part, a [T, p] with its one, b [T, q]


def cotangent(target: str, process: Process, output: Tensor, x: Tensor, draw: Draw) -> Tensor:
    """Eq. 3 (RQ1): what is back-propagated, the gradient at the output of <1, F>, ||F||^2 or the
    weighted loss.
    """
    if target == "sum":
        return torch.ones_like(output)
    if target == "squared":
        return 2 * output
    weight = float(process.loss_weight(process.check(draw.sigma)))
    return 2 * weight * (output - process.target(x, draw.sigma, draw.noise.to(x)))


def factors(
    denoiser: Denoiser, x: Tensor, cond: Cond, draw: Draw, cotangent_of: Callable[[Tensor], Tensor]
) -> tuple[LayerFactors, Tensor]:
    """Eq. 10: the factors of one sample x [C, H, W] in every tracked layer, and the output."""
    calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def record(name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            output = output + torch.zeros_like(output, requires_grad=True)
            calls.append((name, module, arguments[0].detach().clone(), output))
            return output.clone()  # the network may change it in place

        return hook

    modules = {name: denoiser.network.get_submodule(name) for name in denoiser.layers}
    handles = [module.register_forward_hook(record(name)) for name, module in modules.items()]
    try:
        x_sigma = denoiser.process.add_noise(x[None], draw.sigma, draw.noise[None].to(x))
        output = denoiser(x_sigma, draw.sigma, map_cond(cond, lambda value: value[None]))
    finally:
        for handle in handles:
            handle.remove()
    outputs = [call[3] for call in calls]
    grads = torch.autograd.grad(output, outputs, cotangent_of(output.detach()), allow_unused=True)
    found: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    for (name, module, inputs, made), grad in zip(calls, grads, strict=True):
        for part, a, b in taken_apart(
            name, module, inputs, torch.zeros_like(made) if grad is None else grad
        ):
            found.setdefault(part, ([], []))
            found[part][0].append(a)
            found[part][1].append(b)
    # several calls of one layer: more positions; a vector's calls are summed
    merged = [
        (part, a[0], sum(b, torch.zeros_like(b[0])))
        if a[0].shape[1] == 0
        else (part, torch.cat(a), torch.cat(b))
        for part, (a, b) in found.items()
    ]
    return merged, output.detach()


def taken_apart(name: str, module: Any, x: Tensor, grad: Tensor) -> LayerFactors:
    """Eqs. 10, 14-19: one call of a layer as factors a [T, p] and b [T, q]; a vector gradient has p
    = 0 and T = 1.
    """
    with torch.enable_grad():
        if isinstance(module, nn.Linear):
            a, b = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
            return [(name, _with_one(a) if module.bias is not None else a, b)]
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            # patches, by convolving with a kernel that picks out each tap of each channel
            groups, inputs = module.groups, module.in_channels // module.groups
            taps = torch.eye(module.weight[0].numel(), dtype=x.dtype).reshape(
                -1, *module.weight.shape[1:]
            )
            conv: Any = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.ndim]
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            padded = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
            found = []
            for group in range(groups):
                channels = padded[:, group * inputs : (group + 1) * inputs]
                patches = conv(channels, taps, stride=module.stride, dilation=module.dilation)
                # frames that are rows of their own are more positions
                sides = (patches, grad.chunk(groups, 1)[group])
                a, b = (side.movedim(1, -1).flatten(0, -2) for side in sides)
                label = f"{name}[{group}]" if groups > 1 else name
                found.append((label, _with_one(a) if module.bias is not None else a, b))
            return found
        if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
            # the kernel-shaped patch at each input location, by asking what the output there
            # answers to
            inputs, found = module.in_channels // module.groups, []
            for group in range(module.groups):
                location = torch.zeros(1, module.in_channels, *x.shape[2:], dtype=x.dtype)
                location[:, group * inputs] = 1
                weight = torch.zeros_like(module.weight)
                patches = []
                for place in range(location[0, 0].numel()):
                    single = torch.zeros_like(location)
                    single.view(module.in_channels, -1)[group * inputs, place] = 1
                    kernel = weight.clone().requires_grad_()
                    answer = torch.func.functional_call(module, {"weight": kernel}, (single,))
                    patches.append(
                        torch.autograd.grad(answer, kernel, grad)[0][group * inputs].flatten()
                    )
                a = x.chunk(module.groups, 1)[group].flatten(2)[0].T
                found.append(
                    (f"{name}[{group}]" if module.groups > 1 else name, a, torch.stack(patches))
                )
            if module.bias is not None:
                found.append((f"{name}.bias", grad.new_zeros(1, 0), _over_positions(grad)))
            return found
        # a norm: the gradients of scale and shift themselves, by autograd
        parameters = {
            key: value.detach().clone().requires_grad_() for key, value in module.named_parameters()
        }
        answer = torch.func.functional_call(module, parameters, (x,))
        grads = torch.autograd.grad(answer, list(parameters.values()), grad)
        return [
            (
                name,
                grad.new_zeros(1, 0),
                torch.cat([cotangent_of.flatten() for cotangent_of in grads])[None],
            )
        ]


def _over_positions(grad: Tensor) -> Tensor:
    """The gradient of a bias: grad [1, C, ...] summed over positions, [1, C].

    A sum that a later normalisation takes to zero leaves only rounding, which must not be scaled to
    length one: what is below 64 roundings of its terms is zero.
    """
    terms = grad.flatten(2).double()
    bound = 64 * torch.finfo(grad.dtype).eps * terms.abs().sum(2)
    total = terms.sum(2)
    return torch.where(total.abs() > bound, total, torch.zeros_like(total)).to(grad.dtype)


def _with_one(a: Tensor) -> Tensor:
    return torch.cat([a, torch.ones_like(a[:, :1])], 1)


def normalised(found: LayerFactors, normalize: str) -> LayerFactors:
    """The underlines of Eq. 7 (RQ3)."""

    def by(x: Tensor, norm: Tensor) -> Tensor:
        return torch.where(norm > 0, x / norm.clamp_min(1e-300), 0.0)

    result = []
    for part, a, b in found:
        vector = a.shape[1] == 0
        if normalize == "sample":
            a, b = (a if vector else by(a, a.norm())), by(b, b.norm())
        elif normalize == "token":
            a, b = (
                (a if vector else by(a, a.norm(dim=1, keepdim=True))),
                by(b, b.norm(dim=1, keepdim=True)),
            )
        elif normalize == "gradient":
            norm = b.norm() if vector else (b.T @ a).norm()
            a, b = (a, by(b, norm)) if vector else (by(a, norm.sqrt()), by(b, norm.sqrt()))
        result.append((part, a, b))
    return result


class Reference:
    """TID with the options of `wherefrom.TID`, in the network's own precision."""

    def __init__(self, denoiser: Denoiser, draws: Draws, **options: Any) -> None:
        self.denoiser, self.draws = denoiser, draws
        defaults = {
            "damping": 0.1,
            "normalize": "sample",
            "target": "sum",
            "curvature": "empirical",
            "aligned": True,
        }
        self.options = {**defaults, "correction": None, "similarity": "kernel", **options}

    def sample(
        self, x: Tensor, cond: Cond, m: int, role: str, index: int, sampled: bool = False
    ) -> tuple[LayerFactors, Tensor, Draw]:
        """Normalised factors of one sample at draw m, and its residual r."""
        draw = (
            self.draws[m]
            if self.options["aligned"]
            else independent_draw(self.draws, role, index, m)
        )

        def cotangent_of(output: Tensor) -> Tensor:
            if sampled:  # RQ5: the target of a squared loss, resampled
                return resampled_cotangent(self.draws, index, m).to(output)[None]
            return cotangent(self.options["target"], self.denoiser.process, output, x[None], draw)

        found, output = factors(self.denoiser, x, cond, draw, cotangent_of)
        residual = (
            output - self.denoiser.process.target(x[None], draw.sigma, draw.noise[None].to(x))
        ).sum()
        return normalised(found, self.options["normalize"]), residual, draw

    def fit(self, dataset: Dataset) -> Reference:
        """Eqs. 6 and 12: damped inverses of A = E[a a^T] and B = E[b b^T] over samples, draws and
        positions.
        """
        items = [split(dataset[index]) for index in range(len(dataset))]
        self.observations = len(items) * len(self.draws)
        sums: dict[str, list[Any]] = {}
        for m in range(len(self.draws)):
            for index, (x, cond) in enumerate(items):
                found = self.sample(x, cond, m, "train", index)[0]
                grads = (
                    self.sample(x, cond, m, "train", index, sampled=True)[0]
                    if self.options["curvature"] == "sampled"
                    else found
                )
                for (part, a, _), (_, _, b) in zip(found, grads, strict=True):
                    entry = sums.setdefault(
                        part,
                        [
                            torch.zeros(a.shape[1], a.shape[1]).to(a),
                            torch.zeros(b.shape[1], b.shape[1]).to(b),
                            0,
                        ],
                    )
                    entry[0] = entry[0] + a.T @ a
                    entry[1] = entry[1] + b.T @ b
                    entry[2] += len(b)
        self.inverses = {
            part: tuple(self._inverse(total / count, part) for total in (a, b))
            for part, (a, b, count) in sums.items()
        }
        return self

    def _inverse(self, moment: Tensor, part: str) -> Tensor:
        if self.options["curvature"] == "identity" or len(moment) == 0:
            return torch.eye(len(moment)).to(moment)
        layer = part.split("[")[0]
        if layer in self.denoiser.layers and not isinstance(
            self.denoiser.network.get_submodule(layer), nn.Linear | nn.modules.conv._ConvNd
        ):
            moment = moment.diagonal().diag()  # a norm: diagonal curvature
        if moment.trace() == 0:
            return torch.zeros_like(moment)
        return torch.linalg.inv(
            moment
            + self.options["damping"] * moment.diagonal().mean() * torch.eye(len(moment)).to(moment)
        )

    def kernel(self, one: LayerFactors, other: LayerFactors) -> Tensor:
        """Eq. 13, summed over layers: <g_q, G^-1 g_i>."""
        total = torch.zeros((), dtype=one[0][2].dtype)
        for (part, a, b), (_, a2, b2) in zip(one, other, strict=True):
            inverse_a, inverse_b = self.inverses[part]
            products = b @ inverse_b @ b2.T
            total = total + (
                products.sum() if a.shape[1] == 0 else ((a @ inverse_a @ a2.T) * products).sum()
            )
        return total

    def scores(self, queries: Dataset, dataset: Dataset) -> Tensor:
        """Eq. 7: tau [Q, N], the mean over draws of the squared kernel (times r / (1 - h) where
        asked, RQ4).
        """
        tau = torch.zeros(len(queries), len(dataset), dtype=torch.float64)
        for m in range(len(self.draws)):
            mine = [self.sample(*split(queries[q]), m, "query", q)[0] for q in range(len(queries))]
            for index in range(len(dataset)):
                found, residual, _ = self.sample(*split(dataset[index]), m, "train", index)
                factor = torch.ones(()) if self.options["correction"] is None else residual
                if self.options["correction"] == "leverage":
                    leverage = self.kernel(found, found) / self.observations
                    factor = factor / (1 - leverage.clamp(max=0.999))
                for q, query in enumerate(mine):
                    kernel = factor * self.kernel(query, found)
                    tau[q, index] += (
                        kernel**2 / self.scale(query, found) / len(self.draws)
                    ).double()
        return tau

    def scale(self, query: LayerFactors, found: LayerFactors) -> Tensor:
        """What a squared kernel is divided by: 1, K(i,i), or K(q,q) K(i,i)."""
        similarity = self.options["similarity"]
        theirs = torch.ones(()) if similarity == "kernel" else self.kernel(found, found)
        return theirs * self.kernel(query, query) if similarity == "cosine" else theirs


def lambda_rank_loss(rho: Tensor, tau: Tensor, scale: float | Tensor) -> Tensor:
    """Eq. 9: the weighted pairwise loss that TIDE learns rankings with; rho and tau [B, B], the
    diagonals unused.
    """
    total, weights = torch.zeros(()).to(rho), torch.zeros(()).to(rho)
    for i in range(len(rho)):
        others = [j for j in range(len(rho)) if j != i]
        order = sorted(others, key=lambda j: -float(tau[i, j]))
        discount = {
            j: 1 / torch.log2(torch.tensor(2.0 + place)).to(rho) for place, j in enumerate(order)
        }
        for place, j in enumerate(others):
            for k in others[place + 1 :]:
                weight = (discount[j] - discount[k]).abs()
                truth = (tau[i, j] > tau[i, k]).to(rho)
                total = total + weight * F.binary_cross_entropy_with_logits(
                    scale * (rho[i, j] - rho[i, k]), truth
                )
                weights = weights + weight
    return total / weights
