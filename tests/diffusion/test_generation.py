"""Training and sampling together: models trained on digits generate digits, under all four
processes.
"""

from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

import wherefrom
from helpers import PROCESSES

SAMPLES = 128


@pytest.fixture(scope="module")
def training_images() -> Tensor:
    return torch.as_tensor(wherefrom.data.digits().pixels)


@pytest.fixture(scope="module")
def classifier(training_images):
    labels = wherefrom.data.digits(labels=True).cond
    return LogisticRegression(max_iter=300).fit(training_images.flatten(1).numpy(), labels.numpy())


def measure(images: Tensor, training_images: Tensor, classifier) -> tuple[float, float, float]:
    """Mean distance to the nearest training digit, mean confidence of a digit classifier, and
    spread over the images.
    """
    nearest = torch.cdist(images.flatten(1), training_images.flatten(1)).min(1).values.mean().item()
    confidence = classifier.predict_proba(images.flatten(1).numpy()).max(1).mean()
    return nearest, float(confidence), images.std(0).mean().item()


def looks_like_digits(nearest: float, confidence: float, spread: float) -> bool:
    return nearest < 3.9 and confidence > 0.66 and 0.4 < spread < 0.65


def trained(process: wherefrom.Process) -> wherefrom.Denoiser:
    size = {
        "width": 64,
        "depth": 2,
        "heads": 4,
        "cond_width": 32,
        "registers": 1,
        "stem_kernel": 3,
        "dropout": 0.0,
    }
    network = wherefrom.models.DiT(
        8, 1, stem=(4,), resample=(1,), gelu="none", process=process, **size
    )
    return wherefrom.Denoiser(
        wherefrom.train(
            network, process, wherefrom.data.digits(), 320, 40, 3e-3, ema=0.98, decay=160
        ),
        process,
    )


@pytest.mark.parametrize("name", PROCESSES)
def test_generated_digits_look_like_digits(name, training_images, classifier):
    denoiser = trained(PROCESSES[name])
    noise = torch.randn(SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = measure(wherefrom.sample(denoiser, noise), training_images, classifier)
    assert looks_like_digits(*found), found


def test_what_a_broken_sampler_makes_does_not_look_like_digits(training_images, classifier):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(training_images), (SAMPLES, 64), generator=generator)
    independent = (
        training_images.flatten(1).gather(0, rows).reshape(SAMPLES, 1, 8, 8)
    )  # right pixels, no digit
    digits = training_images[torch.randperm(len(training_images), generator=generator)[:SAMPLES]]
    broken = {
        "independent pixels": independent,
        "the mean digit": training_images.mean(0).expand(SAMPLES, -1, -1, -1),
        "still noisy": digits + 0.5 * torch.randn(digits.shape, generator=generator),
        "too faint": 0.6 * digits,
        "negative": -digits,
    }
    for name, images in broken.items():
        found = measure(images, training_images, classifier)
        assert not looks_like_digits(*found), (name, found)
