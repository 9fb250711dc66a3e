"""Networks as other people write them, and the oracle of their tests: the parameters' own
gradients, by plain autograd, one image at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wherefrom
from wherefrom.data.items import map_cond, split

EDM = wherefrom.EDM()
WIDTH = 6


def kernels_by_autograd(
    denoiser: wherefrom.Denoiser, draws: wherefrom.Draws, queries: Any, dataset: Any
) -> Tensor:
    """tau of TID(curvature="identity", normalize="none"), [Q, N]: the mean over draws of the
    squared inner product of the gradients of <1, F> with respect to the tracked layers' parameters.
    """
    modules = dict(denoiser.network.named_modules())
    parameters = {
        id(one): one
        for layer in denoiser.layers
        for one in modules[layer].parameters(recurse=False)
    }
    flags = {one: one.requires_grad for one in denoiser.network.parameters()}
    for one in flags:
        one.requires_grad_(True)

    def gradient(item: Any, m: int) -> Tensor:
        x, cond = split(item)
        noise = draws.noises[m][None].to(x)
        x_sigma = denoiser.process.add_noise(x[None], draws.sigmas[m], noise)
        sigma = denoiser.sigma_for(x_sigma, draws.sigmas[m])
        own = map_cond(cond, lambda value: value[None])
        output = denoiser.call(denoiser.network, x_sigma, sigma, own)
        grads = torch.autograd.grad(output.sum(), list(parameters.values()), allow_unused=True)
        known = zip(parameters.values(), grads, strict=True)
        return torch.cat(
            [(torch.zeros_like(p) if g is None else g).flatten() for p, g in known]
        ).detach()

    try:
        tau = torch.zeros(len(queries), len(dataset), dtype=torch.float64)
        for m in range(len(draws)):
            mine, theirs = (
                torch.stack([gradient(one[i], m) for i in range(len(one))]).double()
                for one in (queries, dataset)
            )
            tau += (mine @ theirs.T) ** 2 / len(draws)
    finally:
        for one, flag in flags.items():
            one.requires_grad_(flag)
    return tau


class Net(nn.Module):
    """Layers around a middle that the tests exchange: [B, 1, 8, 8] as 8 tokens of 8 features."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.time = nn.Linear(1, WIDTH)
        self.middle = middle or nn.Identity()

    def forward(self, x: Tensor, sigma: Tensor, cond: Tensor | None = None) -> Tensor:
        hidden = self.inner(x.squeeze(1)) + self.time(sigma.log()[:, None])[:, None]  # [B, 8, W]
        return self.outer(torch.tanh(self.middle(torch.tanh(hidden)))).unsqueeze(1)


class Text(nn.Module):
    """Attention to a condition [B, L, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 4), nn.Linear(5, 4), nn.Linear(5, 4)
        self.out = nn.Linear(4, 8)

    def forward(self, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        q, k, v = self.q(x.squeeze(1)), self.k(cond), self.v(cond)
        return self.out((q @ k.mT).softmax(-1) @ v).unsqueeze(1)


class TextFirst(Text):
    """The condition goes through a layer of its own before anything of the image does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)

    def forward(self, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        return super().forward(x, sigma, torch.tanh(self.first(cond)))


class Subclass(nn.Linear):
    """A forward of its own that does what torch's does."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class GEGLU(nn.Linear):
    """As k-diffusion writes it: half of the outputs gate the other half."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, 2 * outputs)

    def forward(self, x: Tensor) -> Tensor:
        made, gate = super().forward(x).chunk(2, -1)
        return made * F.gelu(gate)


class Standardised(nn.Conv1d):
    """Weight standardisation."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


class Equalised(nn.Linear):
    """The learning rate is in the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 0.5 * self.weight, self.bias)


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.bias


class Through(nn.Module):
    """A layer, and how it is run."""

    def __init__(self, layer: nn.Module, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self._how = layer, how

    def forward(self, x: Tensor) -> Tensor:
        return self._how(self.layer, x)


def without_gradient(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(x)


def by_keyword(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(input=x)


def frames(layer: nn.Module, x: Tensor) -> Tensor:
    """Positions folded into the batch, one image after the other."""
    return layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def frames_minor(layer: nn.Module, x: Tensor) -> Tensor:
    """Positions folded into the batch, all images at the first, all at the second."""
    rows = x.transpose(0, 1)
    return layer(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]).transpose(0, 1)


def positions_first(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.transpose(0, 1)).transpose(0, 1)


def twice_the_batch(layer: nn.Module, x: Tensor) -> Tensor:
    """As guidance does: the batch, and the batch again."""
    one, other = layer(torch.cat([x, -x])).chunk(2)
    return one + 2 * other


def convolved_frames(layer: nn.Module, x: Tensor) -> Tensor:
    """[B, 8, W] as 8 frames of W positions with one channel."""
    return layer(x.flatten(0, 1).unsqueeze(1)).squeeze(1).unflatten(0, x.shape[:2])


def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def checkpointed_twice_over(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


class OwnCheckpoint(torch.autograd.Function):
    """As guided-diffusion writes it."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:
        ctx.run, ctx.x = run, x.detach()
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            return None, torch.autograd.grad(ctx.run(x), x, grad)[0]


def own_checkpoint(layer: nn.Module, x: Tensor) -> Tensor:
    return OwnCheckpoint.apply(layer, x)


def weight_only(layer: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


class SelfAttention(nn.Module):
    """torch's, whose out_proj never runs as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Patched(nn.Module):
    """A LoRA as kohya attaches it: the layer's forward is exchanged for one that adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        before = self.layer.forward
        self.layer.forward = lambda x: before(x) + self.up(self.down(x))  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def tied(bias: bool = True) -> nn.Sequential:
    """Two modules with one weight, and one bias or each its own."""
    pair = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    pair[2].weight = pair[0].weight
    if bias:
        pair[2].bias = pair[0].bias
    return pair


class Table(nn.Module):
    """A layer over the positions of all images at once: as many rows as there are positions."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, WIDTH)
        self.register_buffer("places", torch.randn(positions, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.places).mean(0)


class Mixing(nn.Module):
    """Every image sees the mean of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0, keepdim=True))


class Chance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.randn_like(x))


class Returning(nn.Module):
    """A network whose output comes wrapped."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self._wrap = nn.Linear(8, 8), wrap

    def forward(self, x: Tensor, sigma: Tensor) -> Any:
        return self._wrap(self.layer(x))


class UsedTwice(nn.Module):
    """A layer that runs, and whose weight is used again by function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.layer(x)), self.layer.weight.T)


class Scaled(nn.Linear):
    """A layer that is called with a scale."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


class ScaledOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Scaled(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)), 0.5)


class InChunks(nn.Module):
    """So many rows at a time, whichever images they are of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        return torch.cat([self.layer(some) for some in rows.split(28)]).view_as(x)


class Mine(nn.Module):
    """A layer of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Forgetful(wherefrom.LayerKind):
    """A kind that takes the images of a batch for positions of one."""

    def parts(self, name: str, module: Any) -> list[wherefrom.Part]:
        return [wherefrom.Part(name, WIDTH, WIDTH)]

    def factors(self, module: Any, x: Tensor, grad: Tensor) -> list[wherefrom.Factors]:
        return [wherefrom.Factors(x.flatten(0, -2)[None], grad.flatten(0, -2)[None])]


wherefrom.layer_kind(Mine)(Forgetful)


class ByCondition(nn.Module):
    """A network whose way depends on the condition of each image."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.outer, self._way = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8), way
        self.control = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x.squeeze(1)))
        if self._way == "control":  # only for some images, their rows folded
            some = cond > 0
            if some.any():
                hidden = hidden.clone()
                control = self.control(hidden[some].flatten(0, 1)).view(-1, 8, WIDTH)
                hidden[some] = hidden[some] + control
            return self.outer(hidden).unsqueeze(1)
        order = cond.argsort(stable=True)
        return self.outer(hidden[order])[order.argsort()].unsqueeze(1)


class ByNoise(nn.Module):
    """Another layer at low noise than at high noise."""

    def __init__(self, low: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.high, self.low = nn.Linear(WIDTH, WIDTH), low()

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x.squeeze(1)))
        hidden = self.high(hidden) if float(sigma.mean()) > 1 else self.low(hidden)
        return self.outer(hidden).unsqueeze(1)


class Bare(nn.Module):
    """A layer over a vector that no batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.null = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.null)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A network in float64 with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make().double()


class Items:
    """Random images in float64, with a text each or none."""

    def __init__(self, places: Sequence[int], text: bool = False, grad: bool = False) -> None:
        generator = torch.Generator().manual_seed(11)
        x = torch.randn(40, 1, 8, 8, generator=generator).double()
        words = torch.randn(40, 7, 5, generator=generator).double()
        self.x = x[list(places)]
        self.words = words[list(places)].requires_grad_(grad) if text else None

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] if self.words is None else (self.x[index], self.words[index])
