"""Claims about batches on their way to a network: conditions go along in its precision, and classes
that it does not have are refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom import WherefromError, baselines
from wherefrom.data.batch import for_network
from wherefrom.diffusion.run import Settings
from wherefrom.diffusion.together import train_together

EDM = wherefrom.EDM()
DRAWS = wherefrom.Draws(EDM, (1, 8, 8), 1)


class Conditioned:
    """Noise whose conditions are vectors of some type."""

    def __init__(self, dtype: torch.dtype, count: int = 12) -> None:
        self.x, self.dtype = Noise(count).x, dtype
        self.cond = torch.randn(count, 5, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.cond[index].to(self.dtype)


class Labelled:
    """Noise with given labels."""

    def __init__(self, *labels: int) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return Noise(12).x[index], torch.tensor(self.labels[index])


class Foreign(nn.Module):
    """Somebody else's network with classes."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 4, 3, padding=1)
        self.classes_of = nn.Embedding(classes, 4)
        self.out = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        return self.out(torch.relu(self.body(x) + self.classes_of(cond)[:, :, None, None]))


def model(**changes: Any) -> wherefrom.Denoiser:
    return wherefrom.Denoiser(stirred(small_dit(**changes)), EDM)


def fitted(name: str, denoiser: wherefrom.Denoiser, data: Any) -> Any:
    if name == "TIDE":
        tid = wherefrom.TID(denoiser, DRAWS).fit(data)
        sizes = {"batch_size": 4, "dim": 8, "hidden": 8, "heads": 2}
        return wherefrom.TIDE.distill(tid, data, epochs=0.1, **sizes)
    return {
        "TID": lambda: wherefrom.TID(denoiser, DRAWS),
        "KFAC": lambda: baselines.KFACInfluence(denoiser, DRAWS),
        "DTRAK": lambda: baselines.DTRAK(denoiser, DRAWS, dim=64),
        "MUCS": lambda: baselines.MUCS(denoiser, DRAWS, max_steps=1),
        "activations": lambda: baselines.Encoder.activations(denoiser, DRAWS),
    }[name]().fit(data)


NAMES = ("TID", "TIDE", "KFAC", "DTRAK", "MUCS", "activations")


@pytest.mark.filterwarnings("ignore:.*unlearn")
@pytest.mark.parametrize("name", NAMES)
def test_conditions_of_float64_are_those_of_the_networks_precision(name):
    plain, double = Conditioned(torch.float32), Conditioned(torch.float64)
    denoiser = model(cond_dim=5)
    one, other = fitted(name, denoiser, plain), fitted(name, denoiser, double)
    queries = [[data[index] for index in range(2)] for data in (plain, double)]
    assert torch.equal(one.scores(queries[0], plain), other.scores(queries[1], double))


def test_conditions_of_float64_train_as_those_of_float32(weights_equal):
    network = small_dit(cond_dim=5)
    for together in (False, True):
        trained = []
        for data in (Conditioned(torch.float32), Conditioned(torch.float64)):
            if together:
                how = Settings(2, 4, 1e-3)
                trained += train_together(network, EDM, data, [torch.arange(8)], how)
            else:
                trained.append(wherefrom.train(network, EDM, data, 2, 4, 1e-3))
        assert weights_equal(*trained)


def test_images_of_float64_are_sampled_with_conditions_of_any_precision():
    denoiser, noise = model(cond_dim=5), torch.randn(2, 1, 8, 8)
    cond = Conditioned(torch.float64).cond[:2]
    exact = wherefrom.sample(denoiser, noise, cond, steps=3, guidance=2.0, null=0 * cond)
    double = cond.double()
    assert torch.equal(
        wherefrom.sample(denoiser, noise, double, steps=3, guidance=2.0, null=0 * double), exact
    )


def test_a_network_in_half_precision_gets_its_conditions_in_half_and_labels_as_they_are():
    network = nn.Linear(2, 2).bfloat16()
    cond = {"text": torch.ones(3, 2), "label": torch.arange(3), "mask": torch.ones(3).bool()}
    x, moved = for_network(network, torch.ones(3, 2), cond)
    assert x.dtype == moved["text"].dtype == torch.bfloat16
    assert moved["label"].dtype == torch.int64
    assert moved["mask"].dtype == torch.bool


@pytest.mark.filterwarnings("ignore:.*unlearn")
@pytest.mark.parametrize("bad", [3, -1])
@pytest.mark.parametrize("name", NAMES)
def test_a_class_that_a_dit_does_not_have_is_refused_by_every_attributor(name, bad):
    good, denoiser = Labelled(*[0, 1, 2] * 4), model(classes=3)
    with pytest.raises(WherefromError, match=rf"there is no class {bad}: this DiT has 3, 0 to 2"):
        fitted(name, denoiser, Labelled(*[0, 1] * 5, 0, bad))
    ready = fitted(name, denoiser, good)
    with pytest.raises(WherefromError, match=rf"there is no class {bad}: this DiT has 3, 0 to 2"):
        ready.scores(Labelled(0, bad), good)


@pytest.mark.parametrize("bad", [3, -1])
def test_a_class_that_a_dit_does_not_have_is_refused_in_training_sampling_and_calls(bad):
    network, data = small_dit(classes=3), Labelled(*[0, 1] * 5, 0, bad)
    denoiser, labels = wherefrom.Denoiser(network, EDM), torch.tensor([0, bad])
    how = Settings(1, 4, 1e-3)
    for use in (
        lambda: wherefrom.train(network, EDM, data, 1, 4, 1e-3),
        lambda: train_together(network, EDM, data, [None, torch.arange(8)], how),
        lambda: wherefrom.sample(denoiser, torch.randn(2, 1, 8, 8), labels, steps=2),
        lambda: denoiser(torch.randn(2, 1, 8, 8), 1.0, labels),
    ):
        with pytest.raises(WherefromError, match=rf"there is no class {bad}: this DiT has 3"):
            use()


@pytest.mark.filterwarnings("ignore:only .* parameters are tracked")
def test_a_class_that_another_network_does_not_have_is_said_with_its_embeddings():
    network, data = Foreign(), Labelled(*[0, 1] * 5, 0, 3)
    denoiser = wherefrom.Denoiser(network, EDM)
    for use in (
        lambda: wherefrom.train(network, EDM, data, 3, 12, 1e-3),
        lambda: wherefrom.sample(denoiser, torch.randn(2, 1, 8, 8), torch.tensor([0, 3]), steps=2),
        lambda: wherefrom.TID(denoiser, DRAWS).fit(data),
        lambda: denoiser(torch.randn(2, 1, 8, 8), 1.0, torch.tensor([0, 3])),
    ):
        with pytest.raises(WherefromError, match=r"embedding of Foreign \(classes_of has 3\)"):
            use()


@pytest.mark.parametrize(
    ("cond", "words"),
    [
        (torch.tensor([0]), r"cond has shape \(1,\) for 2 images"),
        (torch.tensor(0), r"cond has shape \(\) for 2 images"),
        ([0, 1], "cond is list"),
        ({"label": [0, 1]}, r"cond\['label'\] is list"),
        ({"label": torch.tensor([0])}, r"cond\['label'\] has shape \(1,\) for 2 images"),
        (["a cat", "a dog"], "cond is list"),
    ],
)
def test_a_condition_that_is_not_of_every_image_of_a_batch_is_refused(cond, words):
    denoiser, x = model(classes=3), torch.randn(2, 1, 8, 8)
    tid = wherefrom.TID(denoiser, DRAWS)
    tid.fit(Labelled(*[0, 1, 2] * 4))
    for use in (
        lambda: wherefrom.sample(denoiser, x, cond, steps=2),
        lambda: tid.pairwise(x, DRAWS[0], cond),
    ):
        with pytest.raises(WherefromError, match=words):
            use()
