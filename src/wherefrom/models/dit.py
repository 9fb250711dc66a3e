"""The paper's backbone: a diffusion transformer between two small convolutional stems, with
adaLN-zero conditioning.

Every size is an argument, from the 146,574,690 parameters of `DiT.coco()` down to a network that
trains in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.items import Cond
from ..diffusion.process import EDM, Process
from ..errors import WherefromError, number, whole


class DiT(nn.Module):
    """forward(x_sigma, sigma, cond=None): the output in the process's parameterisation, of
    x_sigma's shape.

    Args:
        image_size, channels: of the images, which are square.
        width, depth, heads, patch, mlp_ratio: of the transformer.
        cond_width: of the vector that carries noise level, condition and augmentation bit to every
            block.
        classes: condition on one of so many classes; cond is then [B] class indices or [B, classes]
            weights.
        cond_dim: condition on a vector of this size (a text embedding); cond is then [B, cond_dim].
            A condition of None, or a row of zeros, is the null condition.
        process: what the output means; it also sets how the network is preconditioned.
        stem, resample: output channels and stride of each stem block; the decoder mirrors them.
            Both empty: patches are cut from the image itself, as in a plain diffusion transformer.
        registers: learned tokens that belong to no patch.
        gelu: its approximation; "none" is the exact function, which is 5 to 10 times faster on a
            CPU.
        dropout, null_rate: in training, the share of activations dropped and of conditions replaced
            by the null condition.
    """

    position: Tensor  # [T, width]
    frequencies: Tensor  # [128]
    table: Tensor  # [timesteps, 4], or empty

    def __init__(
        self,
        image_size: int = 32,
        channels: int = 3,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        patch: int = 2,
        cond_width: int = 256,
        classes: int | None = None,
        cond_dim: int | None = None,
        process: Process | None = None,
        *,
        stem: Sequence[int] = (4, 4),
        resample: Sequence[int] = (1, 1),
        stem_kernel: int = 5,
        last_factor: int = 4,
        registers: int = 32,
        mlp_ratio: int = 4,
        gelu: Literal["tanh", "none"] = "tanh",
        dropout: float = 0.1,
        null_rate: float = 0.1,
    ) -> None:
        super().__init__()
        sizes = {"image_size": image_size, "channels": channels, "width": width, "depth": depth}
        sizes |= {"heads": heads, "patch": patch, "cond_width": cond_width}
        sizes |= {"stem_kernel": stem_kernel, "last_factor": last_factor, "mlp_ratio": mlp_ratio}
        optional = {"classes": classes, "cond_dim": cond_dim}
        sizes |= {name: size for name, size in optional.items() if size is not None}
        for name, size in sizes.items():
            whole(name, size, 1)
        whole("registers", registers, 0)
        for name, rate in (("dropout", dropout), ("null_rate", null_rate)):
            number(name, rate, least=0, most=1)
        if classes is not None and cond_dim is not None:
            raise WherefromError("a DiT takes classes or cond_dim, not both")
        if len(stem) != len(resample):
            raise WherefromError(
                f"stem {tuple(stem)} and resample {tuple(resample)} need one entry for each "
                "stem block"
            )
        if image_size % (math.prod(resample) * patch):
            raise WherefromError(
                f"image_size {image_size} is no multiple of the stem's stride times patch {patch}"
            )
        if width % heads or width % 4:
            raise WherefromError(f"width {width} must be a multiple of heads {heads} and of 4")
        self.process: Process = process or EDM()
        self.image_size, self.channels, self.classes = image_size, channels, classes
        self.cond_dim = classes if classes is not None else cond_dim
        self.null_rate = null_rate
        side = image_size // math.prod(resample) // patch

        latent = [channels, *stem]
        self.encoder = nn.ModuleList(
            StemBlock(i, o, r, stem_kernel, up=False)
            for i, o, r in zip(latent[:-1], stem, resample, strict=True)
        )
        self.patchify = nn.Conv2d(latent[-1], width, patch, stride=patch)
        self.register_buffer("position", position_code(side, width), persistent=False)
        self.registers = nn.Parameter(torch.zeros(registers, width))

        self.register_buffer("frequencies", noise_frequencies(128), persistent=False)
        # a process over timesteps reads its coefficients off a table: keep it where the network is
        timesteps = torch.arange(int(self.process.range[1]) + 1 if self.process.discrete else 0)
        self.register_buffer(
            "table", torch.stack(self._formulas(timesteps), 1).float(), persistent=False
        )
        self.embed_noise = nn.Sequential(
            nn.Linear(256, cond_width), nn.SiLU(), nn.Linear(cond_width, cond_width)
        )
        self.embed_augmented = nn.Embedding(2, cond_width)
        if self.cond_dim is not None:
            self.null = nn.Parameter(torch.zeros(self.cond_dim))
            self.embed_cond = nn.Sequential(
                nn.Linear(self.cond_dim, cond_width),
                nn.SiLU(),
                nn.Dropout(dropout),
                nn.Linear(cond_width, cond_width),
            )

        self.blocks = nn.ModuleList(
            DiTBlock(width, heads, cond_width, mlp_ratio, gelu, dropout) for _ in range(depth)
        )
        self.modulate = Modulation(cond_width, width, 2)
        self.unpatchify = nn.ConvTranspose2d(width, latent[-1], patch, stride=patch)
        outputs = [*reversed(stem[:-1]), channels * last_factor] if stem else []
        self.decoder = nn.ModuleList(
            StemBlock(i, o, r, stem_kernel, up=True)
            for i, o, r in zip(reversed(stem), outputs, reversed(resample), strict=True)
        )
        self.last = (
            nn.Conv2d(channels * last_factor, channels, 1, bias=False) if stem else nn.Identity()
        )
        final = self.last if stem else self.unpatchify
        for parameter in final.parameters():
            nn.init.zeros_(parameter)

    @classmethod
    def cifar10(cls, **changes: Any) -> Self:
        """The paper's unconditional CIFAR-10 network, 99,787,890 parameters."""
        return cls(**changes)

    @classmethod
    def artbench10(cls, **changes: Any) -> Self:
        """The paper's class-conditional ArtBench-10 network, 99,975,788 parameters."""
        return cls(
            **{"image_size": 64, "classes": 10, "stem": (16, 16), "resample": (1, 2), **changes}
        )

    @classmethod
    def coco(cls, **changes: Any) -> Self:
        """The paper's text-conditional COCO network, 146,574,690 parameters."""
        size = {
            "image_size": 64,
            "cond_dim": 768,
            "cond_width": 1024,
            "stem": (16, 16),
            "resample": (1, 2),
        }
        return cls(**{**size, **changes})

    def forward(
        self,
        x_sigma: Tensor,
        sigma: Tensor,
        cond: Tensor | None = None,
        augmented: Tensor | None = None,
    ) -> Tensor:
        """`augmented` [B] is 1 where a training image was geometrically augmented; None means
        nowhere.
        """
        if x_sigma.shape[1:] != (self.channels, self.image_size, self.image_size):
            size = f"[B, {self.channels}, {self.image_size}, {self.image_size}]"
            raise WherefromError(f"this DiT takes images {size}, not {list(x_sigma.shape)}")
        sigma = sigma.expand(len(x_sigma))
        if self.process.discrete and not sigma.is_floating_point():
            coefficients: Sequence[Tensor] = self.table[sigma].unbind(1)
        else:
            coefficients = self._formulas(sigma)
        # each [B, 1]
        c_skip, c_out, c_in, c_noise = (c.to(x_sigma.dtype)[:, None] for c in coefficients)
        c = self._condition(c_noise, cond, augmented, x_sigma)  # [B, 1, C]
        output = self.raw(c_in[..., None, None] * x_sigma, c)
        return c_skip[..., None, None] * x_sigma + c_out[..., None, None] * output

    def check_cond(self, cond: Cond) -> None:
        """Refuse a condition that this network does not take; on a GPU this waits for the device,
        so it is asked before a run, not in it.
        """
        if cond is None:
            return
        if self.cond_dim is None:
            raise WherefromError(
                "this DiT was built without a condition (classes or cond_dim), but one was given"
            )
        if not isinstance(cond, Tensor):
            raise WherefromError(
                f"this DiT takes a tensor as its condition, not {type(cond).__name__}"
            )
        if cond.is_floating_point():
            return
        if self.classes is None:
            raise WherefromError(
                f"this DiT is conditioned on vectors of {self.cond_dim}, not on class indices"
            )
        if cond.numel() and not 0 <= int(cond.min()) <= int(cond.max()) < self.classes:
            bad = cond[(cond < 0) | (cond >= self.classes)].flatten()[0]
            raise WherefromError(
                f"there is no class {int(bad)}: this DiT has {self.classes}, 0 to "
                f"{self.classes - 1}"
            )

    def raw(self, x: Tensor, c: Tensor) -> Tensor:
        """The network R itself, between its preconditioning: x [B, C, H, W], conditioning vector c
        [B, 1, cond_width].
        """
        for stem in self.encoder:
            x = stem(x)
        x = self.patchify(x)  # [B, width, h, w]
        h, w = x.shape[-2:]
        tokens = x.flatten(2).transpose(1, 2) + self.position  # [B, h*w, width]
        # [B, T, width]
        tokens = torch.cat([self.registers.to(tokens.dtype).expand(len(x), -1, -1), tokens], 1)
        for block in self.blocks:
            tokens = block(tokens, c)
        scale, shift = self.modulate(c)
        tokens = modulated_norm(tokens, scale, shift)[:, len(self.registers) :]
        x = self.unpatchify(tokens.transpose(1, 2).unflatten(2, (h, w)))
        for stem in self.decoder:
            x = stem(x)
        return self.last(x)

    def _formulas(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c_skip, c_out, c_in and c_noise = ln(noise level) / 4, each of sigma's shape."""
        return *self.process.preconditioning(sigma), torch.log(
            self.process.noise_level(sigma) + 1e-6
        ) / 4

    def _condition(
        self, c_noise: Tensor, cond: Tensor | None, augmented: Tensor | None, x: Tensor
    ) -> Tensor:
        angle = c_noise * self.frequencies  # [B, 128]
        c = self.embed_noise(torch.cat([angle.sin(), angle.cos()], 1))  # [B, C]
        bit = (
            torch.zeros(len(x), dtype=torch.long, device=x.device)
            if augmented is None
            else augmented
        )
        c = c + self.embed_augmented(bit)
        if self.cond_dim is not None:
            c = c + self.embed_cond(self._cond_vector(cond, x))
        elif cond is not None:
            self.check_cond(cond)
        return c[:, None]

    def _cond_vector(self, cond: Tensor | None, x: Tensor) -> Tensor:
        """The condition as a vector [B, cond_dim], with the learned null vector where there is
        none.
        """
        if cond is None:
            cond = x.new_zeros(len(x), self.cond_dim or 0)
        elif isinstance(cond, Tensor) and cond.is_floating_point():
            cond = cond.to(x.dtype)
        elif self.classes is None or not isinstance(cond, Tensor):
            self.check_cond(cond)
        else:
            try:
                cond = F.one_hot(cond.long().reshape(-1), self.classes).to(x.dtype)
            except RuntimeError:
                self.check_cond(cond)
                raise
        if cond.shape != (len(x), self.cond_dim):
            raise WherefromError(
                f"the condition of {len(x)} images is [{len(x)}, {self.cond_dim}], not "
                f"{list(cond.shape)}"
            )
        absent = (cond**2).sum(1, keepdim=True) < 1e-8
        if self.training and self.null_rate:
            absent = absent | (torch.rand(len(x), 1, device=x.device) < self.null_rate)
        return torch.where(absent, self.null.to(cond.dtype), cond)


class DiTBlock(nn.Module):
    """x + gate Attn(modulated LN(x)), then x + gate MLP(modulated LN(x)), all gates 0 at first
    (adaLN-zero).
    """

    def __init__(
        self, width: int, heads: int, cond_width: int, mlp_ratio: int, gelu: str, dropout: float
    ) -> None:
        super().__init__()
        self.modulate = Modulation(cond_width, width, 6)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_ratio * width),
            nn.GELU(approximate=gelu),
            nn.Dropout(dropout),
            nn.Linear(mlp_ratio * width, width),
        )

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """x [B, T, width], c [B, 1, cond_width]."""
        gate1, scale1, shift1, gate2, scale2, shift2 = self.modulate(c)
        x = x + gate1 * self.attention(modulated_norm(x, scale1, shift1))
        return x + gate2 * self.mlp(modulated_norm(x, scale2, shift2))


class Attention(nn.Module):
    """Multi-head softmax attention of the tokens among themselves."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # each [B, heads, T, d]
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped)
        mixed = F.dropout(mixed.transpose(1, 2).flatten(2), dropped)  # [B, T, width]
        return self.proj(mixed)


class Modulation(nn.Module):
    """The conditioning vector as `count` vectors of the transformer's width, all 0 at first."""

    def __init__(self, cond_width: int, width: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.linear = nn.Linear(cond_width, count * width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        return self.linear(F.silu(c)).chunk(self.count, dim=-1)  # each [B, 1, width]


class StemBlock(nn.Module):
    """A residual convolution block that may change the resolution by a factor; its main path is 0
    at first.
    """

    def __init__(self, inputs: int, outputs: int, factor: int, kernel: int, up: bool) -> None:
        super().__init__()
        middle = 2 * max(inputs, outputs)
        resampler = nn.ConvTranspose2d if up else nn.Conv2d
        self.norm1 = nn.InstanceNorm2d(inputs, affine=True)
        self.conv1 = resampler(inputs, middle, factor, stride=factor)
        self.norm2 = nn.InstanceNorm2d(middle, affine=True)
        self.conv2 = nn.Conv2d(middle, outputs, kernel, padding=kernel // 2)
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)  # type: ignore[arg-type]  # bias=True, so there is one
        same = inputs == outputs and factor == 1
        self.skip = nn.Identity() if same else resampler(inputs, outputs, factor, stride=factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


def modulated_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """(1 + scale) LN(x) + shift, the LayerNorm without parameters of its own."""
    return (1 + scale) * F.layer_norm(x, x.shape[-1:], eps=1e-6) + shift


def position_code(side: int, width: int) -> Tensor:
    """Fixed sine-cosine code of the patch grid, [side*side, width]: half the channels for the
    column, half for the row.
    """
    frequencies = 10000 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angle = torch.arange(side, dtype=torch.float64)[:, None] * frequencies
    axis = torch.cat([angle.sin(), angle.cos()], 1)  # [side, width / 2]
    columns, rows = axis.repeat(side, 1), axis.repeat_interleave(side, 0)
    return torch.cat([columns, rows], 1).float()


def noise_frequencies(count: int) -> Tensor:
    """2 pi (exp(k / count) - 1) / (e - 1) for k = 1 .. count."""
    k = torch.arange(1, count + 1, dtype=torch.float64)
    return (2 * torch.pi * (torch.exp(k / count) - 1) / (math.e - 1)).float()
