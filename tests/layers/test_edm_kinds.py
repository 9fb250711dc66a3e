"""The worked example of docs/layers.md, as it stands there, gives the gradients of autograd."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wherefrom
from foreign import EDM, Items, kernels_by_autograd, seeded

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"


class Linear(nn.Module):
    """The interface of EDM's layer."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.bias = nn.Parameter(torch.randn(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        made = x @ self.weight.T
        return made if self.bias is None else made.add_(self.bias)


class Conv2d(nn.Module):
    """The interface of EDM's layer: a convolution that may double or halve the image."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        bias: bool = True,
        up: bool = False,
        down: bool = False,
        resample_filter: tuple[int, ...] = (1, 1),
        fused_resample: bool = False,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.up, self.down, self.fused_resample = up, down, fused_resample
        shape = (out_channels, in_channels, kernel, kernel)
        self.weight = nn.Parameter(0.3 * torch.randn(shape)) if kernel else None
        self.bias = nn.Parameter(torch.randn(out_channels)) if kernel and bias else None
        taps = torch.tensor(resample_filter, dtype=torch.float32)
        taps = torch.outer(taps, taps) / taps.sum() ** 2
        self.register_buffer("resample_filter", taps[None, None] if up or down else None)

    def _filtered(self, x: Tensor, padding: int, up: bool) -> Tensor:
        channels = x.shape[1]
        taps = self.resample_filter.to(x).tile(channels, 1, 1, 1)
        how: dict[str, Any] = {"stride": 2, "padding": padding, "groups": channels}
        return F.conv_transpose2d(x, 4 * taps, **how) if up else F.conv2d(x, taps, **how)

    def forward(self, x: Tensor) -> Tensor:
        resampled = self.up or self.down
        beside = (self.resample_filter.shape[-1] - 1) // 2 if resampled else 0
        around = 0 if self.weight is None else self.weight.shape[-1] // 2
        fused = self.fused_resample and self.weight is not None
        if fused and self.up:
            larger = self._filtered(x, max(beside - around, 0), up=True)
            x = F.conv2d(larger, self.weight, padding=max(around - beside, 0))
        elif fused and self.down:
            x = self._filtered(F.conv2d(x, self.weight, padding=around + beside), 0, up=False)
        else:
            x = self._filtered(x, beside, self.up) if resampled else x
            x = x if self.weight is None else F.conv2d(x, self.weight, padding=around)
        return x if self.bias is None else x.add_(self.bias[:, None, None])


class Network(nn.Module):
    """A little UNet of them; `middle` changes the resolution, `back` undoes it."""

    def __init__(self, **middle: Any) -> None:
        super().__init__()
        self.time, self.first = Linear(1, 4), Conv2d(1, 4, 3)
        self.middle = Conv2d(4, 4, **middle)
        other = {"up": middle.get("down", False), "down": middle.get("up", False)}
        self.back = Conv2d(4, 4, kernel=0, **other)
        self.last = Conv2d(4, 1, 1, bias=False)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        hidden = self.first(x).add_(self.time(sigma.log()[:, None])[..., None, None])
        return self.last(torch.tanh(self.back(torch.tanh(self.middle(torch.tanh(hidden))))))


@pytest.fixture(scope="module", autouse=True)
def kinds() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    exec(code[1], {"edm": SimpleNamespace(Linear=Linear, Conv2d=Conv2d)})


@pytest.mark.parametrize(
    "middle",
    [
        {"kernel": 3},
        {"kernel": 1, "bias": False},
        {"kernel": 3, "up": True},
        {"kernel": 3, "down": True},
        {"kernel": 3, "up": True, "fused_resample": True},
        {"kernel": 3, "down": True, "fused_resample": True},
        {"kernel": 3, "up": True, "resample_filter": (1, 3, 3, 1), "fused_resample": True},
        {"kernel": 3, "down": True, "resample_filter": (1, 3, 3, 1), "fused_resample": True},
        {"kernel": 1, "down": True, "resample_filter": (1, 3, 3, 1)},
    ],
)
def test_the_page_s_kinds_give_the_gradients_of_autograd(middle):
    denoiser = wherefrom.Denoiser(seeded(lambda: Network(**middle)), EDM)
    assert denoiser.layers == ("time", "first", "middle", "last")
    assert denoiser.coverage().share == 1
    draws = wherefrom.Draws(EDM, (1, 8, 8), count=2)
    train, queries = Items(range(5)), Items([8, 9])
    tid = wherefrom.TID(denoiser, draws, curvature="identity", normalize="none").fit(train)
    found = tid.scores(queries, train).double()
    expected = kernels_by_autograd(denoiser, draws, queries, train)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9 * float(expected.max()))


def test_a_kind_that_is_wrong_for_its_layer_is_refused_by_name():
    class Doubled(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(2 * x)

    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Doubled(64, 64)

        def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
            return self.layer(x.flatten(1)).reshape(x.shape)

    denoiser = wherefrom.Denoiser(Wrong(), EDM)
    with pytest.raises(wherefrom.WherefromError, match="layer layer, a Doubled"):
        wherefrom.TID(denoiser, wherefrom.Draws(EDM, (1, 8, 8), count=1)).fit(
            torch.randn(4, 1, 8, 8)
        )


@pytest.mark.parametrize("classes", [(), ("Linear",), (int,)])
def test_only_classes_of_modules_have_a_kind(classes):
    with pytest.raises(wherefrom.WherefromError, match="classes of modules"):
        wherefrom.layer_kind(*classes)


def test_only_kinds_are_registered():
    with pytest.raises(wherefrom.WherefromError, match=r"derive it from wherefrom\.LayerKind"):
        wherefrom.layer_kind(Linear)(nn.Linear)
