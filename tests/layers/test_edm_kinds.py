"""The kinds of examples/edm.py, which docs/layers.md shows, give the gradients of autograd."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wherefrom
from foreign import EDM, Items, kernels_by_autograd, seeded
from research import EXAMPLES, Conv2d, Linear, example

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"


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


def test_the_page_shows_the_example_as_it_stands():
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(code) == 3
    assert code[0] in (EXAMPLES / "edm.py").read_text()
    assert code[1] in (EXAMPLES / "edm.py").read_text()


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
def test_the_example_s_kinds_give_the_gradients_of_autograd(middle):
    network = seeded(lambda: Network(**middle))
    example("edm").register(network)
    denoiser = wherefrom.Denoiser(network, EDM)
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

    wherefrom.layer_kind(Doubled)(example("edm").EDMLinear)
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
