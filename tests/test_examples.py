"""The examples for other people's research code, on networks of the same interface and quirks.

TID's scores are those of plain autograd, TIDE's blocks are found, and an ideal network's output is
turned back into the clean image.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import research as r
import wherefrom
from foreign import kernels_by_autograd, seeded
from research import CLASSES, SIZE, example
from wherefrom.diffusion.streams import Taps

SHAPE = (3, SIZE, SIZE)
Make = Callable[[], wherefrom.Denoiser]


def guided(every: int = 1, rescale: bool = False, **how: Any) -> wherefrom.Denoiser:
    network: Any = seeded(lambda: r.UNetModel(**how))
    network.dtype = torch.float64
    diffusion = r.spaced_diffusion(every, rescale)
    return example("guided_diffusion").denoiser(network, diffusion)


def k_diffusion(make: Callable[[], nn.Module]) -> wherefrom.Denoiser:
    return example("k_diffusion").denoiser(seeded(lambda: r.Denoiser(make())), 0.01, 160.0)


def edm(classes: int = 0) -> wherefrom.Denoiser:
    return example("edm").denoiser(seeded(lambda: r.EDMPrecond(classes)))


def score_sde(centered: bool = False) -> wherefrom.Denoiser:
    network = seeded(lambda: r.NCSNpp(r.score_config(centered)))
    return example("score_sde").denoiser(network)


DENOISERS: dict[str, Make] = {
    "EDM": edm,
    "EDM without the class that it takes": lambda: edm(CLASSES),
    "k-diffusion's transformer": lambda: k_diffusion(r.ImageTransformerV2),
    "k-diffusion's UNet": lambda: k_diffusion(r.ImageV1),
    "guided-diffusion": guided,
    "guided-diffusion, checkpointed": lambda: guided(use_checkpoint=True),
    "guided-diffusion, respaced": lambda: guided(every=5, rescale=True),
    "score-SDE": score_sde,
    "score-SDE, centred": lambda: score_sde(centered=True),
}
CONDITIONAL: dict[str, Make] = {
    "EDM": lambda: edm(CLASSES),
    "k-diffusion's transformer": lambda: k_diffusion(lambda: r.ImageTransformerV2(CLASSES)),
    "guided-diffusion": lambda: guided(num_classes=CLASSES),
}


def pictures(first: int, last: int) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(20, *SHAPE, generator=generator, dtype=torch.float64)[first:last]


def with_classes(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(one, torch.tensor(place % CLASSES)) for place, one in enumerate(x)]


def assert_right(denoiser: wherefrom.Denoiser, train: Any, queries: Any) -> None:
    draws = wherefrom.Draws(denoiser.process, SHAPE, count=2, seed=1)
    tid = wherefrom.TID(denoiser, draws, curvature="identity", normalize="none").fit(train)
    found = tid.scores(queries, train, batch_size=4).double()
    expected = kernels_by_autograd(denoiser, draws, queries, train)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9 * float(expected.max()))


# biases and norms are a large part of networks this small
@pytest.mark.filterwarnings("ignore:only .* of the network's parameters")
@pytest.mark.parametrize("name", DENOISERS)
def test_scores_are_those_of_autograd(name):
    assert_right(DENOISERS[name](), pictures(0, 6), pictures(8, 10))


@pytest.mark.filterwarnings("ignore:only .* of the network's parameters")
@pytest.mark.parametrize("name", CONDITIONAL)
def test_and_so_are_those_of_images_with_classes(name):
    train, queries = with_classes(pictures(0, 6)), with_classes(pictures(8, 10))
    assert_right(CONDITIONAL[name](), train, queries)


@pytest.mark.filterwarnings("ignore:only .* of the network's parameters")
@pytest.mark.parametrize(
    "name", ["EDM", "k-diffusion's transformer", "guided-diffusion", "score-SDE"]
)
def test_and_in_bfloat16_they_are_much_the_same(name):
    denoiser, x = DENOISERS[name](), pictures(0, 8).float()
    network: Any = denoiser.network.float()
    if hasattr(network, "dtype"):
        network.dtype = torch.float32
    draws = wherefrom.Draws(denoiser.process, SHAPE, count=2, seed=1)
    how = {"curvature": "identity", "normalize": "none"}
    full, low = (
        wherefrom.TID(denoiser, draws, precision=kind, **how).fit(x[:6]).scores(x[6:], x[:6])
        for kind in ("fp32", "bf16")
    )
    torch.testing.assert_close(low, full, rtol=0.1, atol=0.01 * float(full.max()))


@pytest.mark.parametrize("name", DENOISERS)
def test_every_linear_layer_and_convolution_is_tracked(name):
    denoiser = DENOISERS[name]()
    matrices = {key for key, one in denoiser.network.named_parameters() if one.ndim > 1}
    assert not matrices & set(denoiser.coverage().left_out)


@pytest.mark.parametrize(
    ("name", "blocks", "streams"),
    [
        ("EDM", 3, [(8, 8, 8), (8, 4, 4), (4, 8, 8)]),
        ("k-diffusion's transformer", 3, [(8, 8, 8), (16, 4, 4)]),
        ("k-diffusion's UNet", 3, [(6, 8, 8), (6, 4, 4)]),
        ("guided-diffusion", 5, [(4, 8, 8)]),
        ("score-SDE", 2, [(4, 8, 8)]),
    ],
)
def test_the_blocks_are_found_and_see_the_image(name, blocks, streams):
    denoiser = DENOISERS[name]()
    assert len(denoiser.blocks) == blocks
    assert Taps(denoiser, SHAPE).shapes(pictures(0, 2), None) == streams


def test_the_features_of_the_transformer_are_last():
    denoiser = DENOISERS["k-diffusion's transformer"]()
    seen = {}
    for name in denoiser.blocks:
        block = denoiser.network.get_submodule(name)
        block.register_forward_hook(lambda _, __, made, name=name: seen.setdefault(name, made))
    taps = Taps(denoiser, SHAPE)
    denoiser(pictures(0, 2), 1.0)
    for block in taps.blocks:
        assert torch.equal(block.image(seen[block.name]), seen[block.name].movedim(-1, 1))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: r.Denoiser(r.ImageTransformerV2()), "a LinearGEGLU"),
        (lambda: r.Denoiser(r.ImageV1()), "or on chance"),
        (r.UNetModel, "custom autograd function"),
    ],
    ids=["k-diffusion's transformer", "k-diffusion's UNet", "guided-diffusion"],
)
def test_what_is_adapted_would_be_refused_by_name(make, says, monkeypatch):
    monkeypatch.setattr("wherefrom.layers.kinds._KINDS", list(plain_kinds()))
    denoiser = wherefrom.Denoiser(
        make(), wherefrom.DDPM.linear(), call=lambda network, x, t, _: network(x, t + 1.0)[:, :3]
    )
    tid = wherefrom.TID(denoiser, wherefrom.Draws(denoiser.process, SHAPE, count=1))
    with pytest.raises(wherefrom.WherefromError, match=says):
        tid.fit(pictures(0, 4).float())


def plain_kinds() -> list[Any]:
    """The kinds that no example has registered."""
    from wherefrom.layers.kinds import _KINDS

    return [one for one in _KINDS if type(one[1]).__module__.startswith("wherefrom.")]


def test_checkpoints_are_gone_and_the_output_is_the_same():
    network: Any = seeded(lambda: r.UNetModel(use_checkpoint=True))
    network.dtype = torch.float64
    x, t = pictures(0, 2), torch.tensor([3, 400])
    before = network(x, t)[:, :3]
    denoiser = example("guided_diffusion").denoiser(network, r.spaced_diffusion())
    assert torch.equal(denoiser(x, t), before)


def test_a_network_in_float16_is_brought_to_float32():
    network = r.UNetModel()
    for blocks in (network.input_blocks, network.middle_block, network.output_blocks):
        for module in blocks.modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d):
                module.half()
    network.dtype = torch.float16
    denoiser = example("guided_diffusion").denoiser(network, r.spaced_diffusion())
    assert {one.dtype for one in network.parameters()} == {torch.float32}
    assert bool(torch.isfinite(denoiser(pictures(0, 2).float(), 3)).all())


def test_what_predicts_something_else_is_refused():
    diffusion = r.spaced_diffusion()
    diffusion.model_mean_type.name = "START_X"
    with pytest.raises(ValueError, match="predicts the image"):
        example("guided_diffusion").denoiser(r.UNetModel(), diffusion)
    config = r.score_config()
    config.training.continuous = False
    with pytest.raises(ValueError, match="does not take sigma"):
        example("score_sde").denoiser(r.NCSNpp(config))


# --- ideal networks -------------------------------------------------------------------------------


def ideal_edm(x: Tensor, noise: Tensor) -> wherefrom.Denoiser:
    network = r.EDMPrecond()

    def says(inside: Tensor, noise_labels: Tensor, _: None) -> Tensor:
        sigma = (4 * noise_labels).exp()[:, None, None, None]
        torch.testing.assert_close(inside, (x + sigma * noise) / (sigma**2 + 0.25).sqrt())
        return preconditioned(x, noise, sigma)

    network.model = r.Ideal(says)
    return example("edm").denoiser(network)


def ideal_k(x: Tensor, noise: Tensor) -> wherefrom.Denoiser:
    inner = r.Ideal(lambda _, sigma: preconditioned(x, noise, sigma[:, None, None, None]))
    return example("k_diffusion").denoiser(r.Denoiser(inner))


def preconditioned(x: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """What the inside of a preconditioned network is trained to say."""
    skip = 0.25 / (sigma**2 + 0.25)
    return (x - skip * (x + sigma * noise)) / (0.5 * sigma / (sigma**2 + 0.25).sqrt())


def ideal_guided(x: Tensor, noise: Tensor) -> wherefrom.Denoiser:
    diffusion = r.spaced_diffusion(every=5, rescale=True)

    def says(_: Tensor, time: Tensor) -> Tensor:
        assert set(time.tolist()) <= {2.0 * step for step in diffusion.timestep_map}
        return torch.cat([noise, torch.full_like(noise, 9.0)], 1)

    network = r.Ideal(says, dtype=torch.float64)
    return example("guided_diffusion").denoiser(network, diffusion)


def ideal_score(x: Tensor, noise: Tensor, centered: bool = False) -> wherefrom.Denoiser:
    def says(noised: Tensor, sigma: Tensor) -> Tensor:
        sigma = sigma[:, None, None, None]
        theirs = x if centered else (x + 1) / 2
        torch.testing.assert_close(noised, theirs + sigma * noise)
        return -noise / sigma

    return example("score_sde").denoiser(r.Ideal(says, config=r.score_config(centered)))


@pytest.mark.parametrize(
    "ideal",
    [ideal_edm, ideal_k, ideal_guided, ideal_score, lambda *of: ideal_score(*of, centered=True)],
    ids=["EDM", "k-diffusion", "guided-diffusion", "score-SDE", "score-SDE, centred"],
)
def test_an_ideal_network_gives_the_clean_image(ideal):
    x, noise = pictures(0, 2), pictures(2, 4)
    denoiser = ideal(x, noise)
    for sigma in denoiser.process.grid(4):
        x_sigma = denoiser.process.add_noise(x, sigma, noise)
        clean = denoiser.process.clean(denoiser(x_sigma, sigma), x_sigma, sigma)
        torch.testing.assert_close(clean, x, rtol=0, atol=1e-5)


# --- the scripts ----------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for place in range(8):
        path = tmp_path / "ab"[place % 2] / f"{place}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (9, 8, 3), dtype=np.uint8)).save(path)
    return tmp_path


def configured(network: nn.Module, classes: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    model = {"sigma_min": 0.01, "sigma_max": 80, "input_channels": 3, "input_size": [SIZE, SIZE]}
    return network, {"model": model, "dataset": {"num_classes": classes}}


@pytest.mark.filterwarnings("ignore:.*of the network's parameters")
@pytest.mark.filterwarnings("ignore:.*range")  # what an untrained network makes is no image
@pytest.mark.parametrize(
    ("name", "loaded"),
    [
        ("edm", r.EDMPrecond),
        ("edm", lambda: r.EDMPrecond(2)),
        ("k_diffusion", lambda: configured(r.Denoiser(r.ImageV1()))),
        ("k_diffusion", lambda: configured(r.Denoiser(r.ImageTransformerV2(2)), classes=2)),
        ("guided_diffusion", lambda: (r.UNetModel(), r.spaced_diffusion(every=50))),
        ("guided_diffusion", lambda: (r.UNetModel(num_classes=2), r.spaced_diffusion(every=50))),
        ("score_sde", lambda: r.NCSNpp(r.score_config())),
    ],
)
def test_the_script_prints_the_images_by_their_influence(name, loaded, images, monkeypatch, capsys):
    script = example(name)
    monkeypatch.setattr(script, "load", lambda checkpoint: loaded())
    script.main("checkpoint", str(images))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {path for _, path in lines} == {str(path) for path in images.rglob("*.png")}
    scores = [float(score) for score, _ in lines]
    assert scores == sorted(scores, reverse=True)
