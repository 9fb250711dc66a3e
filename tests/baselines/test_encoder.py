"""Claims about encoders: cosines of embeddings, what a store keeps and refuses, CLIP and DINO as
transformers has them, and the denoiser's own activations.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.artefacts.artefact import Artefact
from wherefrom.baselines import Encoder, activations
from wherefrom.baselines import encoder as module
from wherefrom.diffusion.streams import Taps, listening
from wherefrom.search import store as vectors

QUERIES = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(3)).clamp(-1, 1)
WEIGHT = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))


class Counting:
    """A fixed random projection that counts the images it is given, and may be interrupted."""

    def __init__(self, patience: int = 10**9) -> None:
        self.images, self.patience = 0, patience

    def __call__(self, x: Tensor) -> Tensor:
        self.images += len(x)
        if self.images > self.patience:
            raise KeyboardInterrupt
        return torch.tanh(x.flatten(1) @ WEIGHT)


def embedded(x: Tensor) -> Tensor:
    return torch.tanh(x.flatten(1).double() @ WEIGHT.double())


def cosines(one: Tensor, other: Tensor) -> Tensor:
    """One pair of vectors at a time, in float64."""
    return torch.stack(
        [F.cosine_similarity(row[None].double(), other.double()) for row in one]
    ).float()


def close(one: Tensor, other: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(one, other, atol=atol, rtol=0)


# --- any encoder ----------------------------------------------------------------------------------


def test_scores_are_the_cosines_of_the_embeddings():
    expected = cosines(embedded(QUERIES), embedded(Noise(40).x))
    close(Encoder(Counting()).fit(Noise(40)).scores(QUERIES, Noise(40)), expected)
    close(Encoder(Counting()).scores(QUERIES, Noise(40)), expected)


def test_attribution_is_both_ends_of_a_full_sort():
    method = Encoder(Counting(), "projection").fit(Noise(40))
    hits, (best, order) = (
        method.attribute(QUERIES, Noise(40), 6),
        method.scores(QUERIES, Noise(40)).sort(1, descending=True),
    )
    assert torch.equal(hits.indices, order[:, :6])
    assert torch.equal(hits.scores, best[:, :6])
    assert torch.equal(hits.least_indices, order.flip(1)[:, :6])
    assert torch.equal(hits.least_scores, best.flip(1)[:, :6])
    assert [one["images"] for one in hits.about["data"]] == [40]
    assert {name: one for name, one in hits.about.items() if name != "data"} == {
        "method": "Encoder",
        "encoder": "projection",
        "conditional": False,
        "dtype": "float32",
    }


def test_batches_and_chunks_do_not_matter(monkeypatch):
    scores = Encoder(Counting()).fit(Noise(40)).scores(QUERIES, Noise(40))
    monkeypatch.setattr(module, "_SCORES", 15)  # three training images at a time
    for size in (1, 7, 100):
        method = Encoder(Counting()).fit(Noise(40), size)
        starts = [start for start, _ in method.chunks(QUERIES, Noise(40), size)]
        assert starts == list(range(0, 40, 3))
        close(method.scores(QUERIES, Noise(40), size), scores)
        close(Encoder(Counting()).scores(QUERIES, Noise(40), size), scores)


def test_the_fitted_set_is_not_embedded_again_and_another_one_is_refused():
    encode = Counting()
    method = Encoder(encode).fit(Noise(40))
    encode.images = 0
    method.scores(QUERIES, Noise(40))
    assert encode.images == 5, "the queries alone"
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"this Counting was fitted to another data set: call fit\(dataset\) first",
    ):
        method.scores(QUERIES, Noise(30))
    close(
        method.fit(Noise(30)).scores(QUERIES, Noise(30)),
        cosines(embedded(QUERIES), embedded(Noise(30).x)),
    )


def test_a_condition_reaches_the_encoders_that_ask_for_it():
    close(
        Encoder(Counting()).scores(Noise(9, labels=True), Noise(9, labels=True)).diagonal(),
        torch.ones(9),
    )

    def shifted(x: Tensor, cond: Tensor) -> Tensor:
        return x.flatten(1) + cond[:, None]

    method = Encoder(shifted, conditional=True).fit(Noise(9, labels=True))
    expected = shifted(Noise(9).x, torch.arange(9) % 3)
    close(method.scores(Noise(9, labels=True), Noise(9, labels=True)), cosines(expected, expected))


def test_a_module_is_evaluated_in_its_own_type_and_left_as_it_was():
    network = (
        nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.BatchNorm1d(64), nn.Linear(64, 8))
        .double()
        .train()
    )
    network[1].eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    scores = Encoder(network).fit(Noise(20)).scores(QUERIES, Noise(20))
    assert [part.training for part in network] == [True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(
        parameter.requires_grad and parameter.grad is None for parameter in network.parameters()
    )
    network.eval()
    close(scores, cosines(network(QUERIES.double()), network(Noise(20).x.double())).detach())


# --- stores ---------------------------------------------------------------------------------------


def test_a_finished_store_is_reopened_without_the_encoder(tmp_path):
    scores = (
        Encoder(Counting(), "projection").fit(Noise(40), store=tmp_path).scores(QUERIES, Noise(40))
    )
    again = Counting()
    method = Encoder(again, "projection").fit(Noise(40), store=tmp_path)
    assert again.images == 0
    assert torch.equal(method.scores(QUERIES, Noise(40)), scores)
    assert again.images == 5


def test_an_interrupted_store_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(vectors, "_SHARD", 8 * 12 * 4)  # eight images
    with pytest.raises(KeyboardInterrupt):
        Encoder(Counting(patience=29), "projection").fit(Noise(40), 4, store=tmp_path)
    done = sum(Artefact.open(tmp_path, "table of embeddings").state["counts"])
    assert 0 < done < 40
    rest = Counting()
    method = Encoder(rest, "projection").fit(Noise(40), 4, store=tmp_path)
    assert rest.images == 1 + 40 - done, "one image says how long a vector is"
    close(method.scores(QUERIES, Noise(40)), cosines(embedded(QUERIES), embedded(Noise(40).x)))


def linear(seed: int, width: int = 8) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())


def test_a_store_knows_modules_by_their_weights_and_layers(tmp_path):
    Encoder(linear(0)).fit(Noise(10), store=tmp_path)
    Encoder(linear(0), "another name").fit(Noise(10), store=tmp_path)
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"holds another table of embeddings: weights was .*; " r"choose another folder",
    ):
        Encoder(linear(1)).fit(Noise(10), store=tmp_path)
    with pytest.raises(
        wherefrom.WherefromError, match=r"holds another table of embeddings: " r"architecture was "
    ):
        Encoder(nn.Sequential(*linear(0)[:2], nn.Tanh())).fit(Noise(10), store=tmp_path)
    with pytest.raises(
        wherefrom.WherefromError, match=r"holds another table of embeddings: " r".*data was "
    ):
        Encoder(linear(0)).fit(Noise(11), store=tmp_path)


def test_a_store_knows_other_callables_by_their_names(tmp_path):
    with pytest.raises(
        wherefrom.WherefromError, match=r"cannot tell 'Counting' from other encoders: name it"
    ):
        Encoder(Counting()).fit(Noise(10), store=tmp_path)
    assert not list(tmp_path.iterdir())
    Encoder(Counting(), "one").fit(Noise(10), store=tmp_path)
    with pytest.raises(
        wherefrom.WherefromError,
        match="encoder was 'one' and is now 'other'; choose another folder",
    ):
        Encoder(Counting(), "other").fit(Noise(10), store=tmp_path)


def test_a_store_knows_whether_the_encoder_was_given_conditions(tmp_path):
    def encode(x: Tensor, cond: Tensor | None = None) -> Tensor:
        return x.flatten(1) if cond is None else x.flatten(1) + cond[:, None]

    data = Noise(10, labels=True)
    Encoder(encode, "one").fit(data, store=tmp_path)
    conditional = Encoder(encode, "one", conditional=True)
    with pytest.raises(wherefrom.WherefromError, match="conditional was False and is now True"):
        conditional.fit(data, store=tmp_path)
    assert conditional.about != Encoder(encode, "one").about


def test_another_encoder_under_the_same_name_is_found_out_by_its_vectors(tmp_path, monkeypatch):
    def longer(x: Tensor) -> Tensor:
        return x.flatten(1)

    monkeypatch.setattr(vectors, "_SHARD", 8 * 12 * 4)
    with pytest.raises(KeyboardInterrupt):
        Encoder(Counting(patience=20), "projection").fit(Noise(24), 4, store=tmp_path)
    with pytest.raises(wherefrom.WherefromError, match="dim was 12 and is now 64"):
        Encoder(longer, "projection").fit(Noise(24), 4, store=tmp_path)
    Encoder(Counting(), "projection").fit(Noise(24), 4, store=tmp_path)
    with pytest.raises(
        wherefrom.WherefromError, match="queries have embeddings of 64 numbers and the store of 12"
    ):
        Encoder(longer, "projection").fit(Noise(24), 4, store=tmp_path).scores(QUERIES, Noise(24))


@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (
            lambda x: x,
            r"the encoder made \(1, 1, 8, 8\) of \(1, 1, 8, 8\): it must make one vector for "
            r"each image",
        ),
        (lambda x: x.flatten(1)[:0], r"the encoder made \(0, 64\) of"),
        (lambda x: [x], "the encoder made list of"),
        (lambda x: x.flatten(1) / 0, "the embedding of item 0 is not finite"),
    ],
)
def test_what_is_no_embedding_is_refused(tmp_path, encode, message):
    with pytest.raises(wherefrom.WherefromError, match=message):
        Encoder(encode, "odd").fit(Noise(10), store=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: Encoder("clip"), "an encoder is a callable .* not str"),
        (lambda: Encoder(Counting()).fit(Noise(0)), "the data set is empty"),
        (lambda: Encoder(Counting()).fit(Noise(4), 0), "batch_size must be at least 1, not 0"),
        (
            lambda: Encoder(Counting()).scores(QUERIES, Noise(4), 0),
            "batch_size must be at least 1, not 0",
        ),
        (lambda: Encoder(Counting()).scores(QUERIES[:0], Noise(4)), "there are no queries"),
        (
            lambda: Encoder(Counting()).scores(QUERIES[..., :4], Noise(4)),
            r"shape \(1, 8, 4\), the data set of \(1, 8, 8\)",
        ),
        (
            lambda: Encoder(lambda x: x.flatten(1) * 1e30).scores(QUERIES, Noise(4)),
            "the embedding of query 0 is not finite",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(ask, message):
    with pytest.raises(wherefrom.WherefromError, match=message):
        ask()


# --- CLIP and DINO --------------------------------------------------------------------------------

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


class Colours(Noise):
    """Random colour images, a little beyond the range."""

    def __init__(self, count: int = 6, channels: int = 3, size: int = 20) -> None:
        super().__init__(count)
        self.x = 0.7 * torch.randn(
            count, channels, size, size, generator=torch.Generator().manual_seed(5)
        )


def tiny_clip(folder: Path, prepared: bool = True) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    size = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {**size, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.CLIPConfig(
        text_config=text,
        vision_config={**size, "image_size": 16, "patch_size": 8},
        projection_dim=12,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = transformers.CLIPModel(config).eval()
    network.save_pretrained(folder)
    if prepared:
        content = {
            "crop_size": 16,
            "do_center_crop": True,
            "image_mean": MEAN,
            "image_std": STD,
            "resample": 3,
            "size": 16,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(content))
    return network


def tiny_dino(folder: Path, prepared: bool = True, kind: str = "Dinov2") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    size = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 42,
        "patch_size": 14,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = getattr(transformers, f"{kind}Model")(
            getattr(transformers, f"{kind}Config")(**size)
        ).eval()
    network.save_pretrained(folder)
    if prepared:
        crop = {
            "crop_size": {"height": 28, "width": 28},
            "do_center_crop": True,
            "size": {"shortest_edge": 32},
        }
        (folder / "preprocessor_config.json").write_text(
            json.dumps({**crop, "image_mean": MEAN, "image_std": STD})
        )
    return network


def pixels(x: Tensor, size: int, mean: list[float], std: list[float]) -> Tensor:
    """What a model gets to see of images in [-1, 1], one image and channel at a time."""
    images = []
    for image in x.expand(-1, 3, -1, -1):
        seen = F.interpolate(
            ((image + 1) / 2).clamp(0, 1)[None], (size, size), mode="bicubic", antialias=True
        )[0].clamp(0, 1)
        images.append(torch.stack([(seen[c] - mean[c]) / std[c] for c in range(3)]))
    return torch.stack(images)


@pytest.mark.parametrize("channels", [3, 1])
def test_clip_is_the_projected_image_embedding(tmp_path, channels):
    network, x = tiny_clip(tmp_path), Colours(channels=channels).x
    state = torch.random.get_rng_state()
    method = Encoder.clip(tmp_path, device="cpu")
    with torch.no_grad():
        expected = network.visual_projection(
            network.vision_model(pixel_values=pixels(x, 16, MEAN, STD)).pooler_output
        )
        close(method.encode(x), expected, 1e-5)
        given = network(
            pixel_values=pixels(x, 16, MEAN, STD), input_ids=torch.tensor([[0, 1]])
        ).image_embeds
    close(F.normalize(method.encode(x), dim=1), given, 1e-5)
    close(
        method.fit(Colours(channels=channels)).scores(x[:2], Colours(channels=channels)),
        cosines(expected[:2], expected),
        1e-5,
    )
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["Dinov2", "Dinov2WithRegisters"])
def test_dino_is_the_class_token_at_the_preprocessors_size(tmp_path, kind):
    network, x = tiny_dino(tmp_path, kind=kind), Colours().x
    method = Encoder.dino(tmp_path, device="cpu")
    with torch.no_grad():
        expected = network(pixel_values=pixels(x, 28, MEAN, STD)).last_hidden_state[:, 0]
    close(method.encode(x), expected, 1e-5)
    close(method.scores(x[:2], Colours()), cosines(expected[:2], expected), 1e-5)


def test_without_a_preprocessor_the_published_constants_serve(tmp_path):
    clip, dino, x = (
        tiny_clip(tmp_path / "clip", False),
        tiny_dino(tmp_path / "dino", False),
        Colours(2).x,
    )
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    with torch.no_grad():
        expected = clip.visual_projection(
            clip.vision_model(pixel_values=pixels(x, 16, mean, std)).pooler_output
        )
        close(Encoder.clip(tmp_path / "clip", "cpu").encode(x), expected, 1e-5)
        expected = dino(
            pixel_values=pixels(x, 224, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        ).last_hidden_state[:, 0]
        close(Encoder.dino(tmp_path / "dino", "cpu").encode(x), expected, 1e-5)


def test_transformers_own_preprocessing_is_the_same_to_a_rounded_pixel(tmp_path):
    transformers = pytest.importorskip("transformers")
    image = pytest.importorskip("PIL.Image")
    network = tiny_clip(tmp_path)
    bytes_ = torch.randint(
        0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    theirs = getattr(
        transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor
    ).from_pretrained(tmp_path)
    seen = theirs(
        [image.fromarray(each.permute(1, 2, 0).numpy()) for each in bytes_], return_tensors="pt"
    )["pixel_values"]
    x = bytes_ / 127.5 - 1
    assert (seen - pixels(x, 16, MEAN, STD)).abs().max() < 1.01 / 255 / min(STD)
    with torch.no_grad():
        expected = network.visual_projection(network.vision_model(pixel_values=seen).pooler_output)
        assert F.cosine_similarity(Encoder.clip(tmp_path, "cpu").encode(x), expected).min() > 0.999


def test_a_store_tells_checkpoints_and_preprocessing_apart(tmp_path):
    tiny_clip(tmp_path / "clip")
    Encoder.clip(tmp_path / "clip", "cpu").fit(Colours(), store=tmp_path / "store")
    tiny_clip(tmp_path / "bare", prepared=False)
    with pytest.raises(
        wherefrom.WherefromError, match="holds another table of embeddings: weights was"
    ):
        Encoder.clip(tmp_path / "bare", "cpu").fit(Colours(), store=tmp_path / "store")
    (tmp_path / "clip").rename(tmp_path / "elsewhere")
    Encoder.clip(tmp_path / "elsewhere", "cpu").fit(Colours(), store=tmp_path / "store")


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        wherefrom.WherefromError, match=r"'transformers'.*pip install 'wherefrom\[encoders\]'"
    ):
        Encoder.clip()


@pytest.mark.parametrize("model", ["/no/such/folder", "somebody/a-model"])
def test_a_hub_that_cannot_be_reached_leaves_two_ways_out(model, monkeypatch):
    transformers = pytest.importorskip("transformers")

    def unreachable(place: str) -> None:
        raise OSError("We couldn't connect to the hub.\nCheck your connection")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    for ready_made in (Encoder.clip, Encoder.dino):
        with pytest.raises(
            wherefrom.WherefromError,
            match=r"no local folder.*folder of a copy.*or get online, or set HF_HOME",
        ) as caught:
            ready_made(model)
        assert "\n" not in str(caught.value)


def test_a_folder_of_something_else_is_refused(tmp_path):
    tiny_dino(tmp_path / "dino")
    with pytest.raises(wherefrom.WherefromError, match="is a model of the type 'dinov2', not CLIP"):
        Encoder.clip(tmp_path / "dino")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"holds no DINOv2 that transformers can read \(.*\): download it there again",
    ):
        Encoder.dino(tmp_path / "empty")
    (tmp_path / "dino" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(
        wherefrom.WherefromError, match="holds no DINOv2 that transformers can read"
    ):
        Encoder.dino(tmp_path / "dino")


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    tiny_dino(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name: value for name, value in load_file(file).items() if "layernorm" not in name}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        wherefrom.WherefromError, match=r"lacks weights of DINOv2, '.*layernorm.*' among them"
    ):
        Encoder.dino(tmp_path)


def test_latents_are_refused(tmp_path):
    tiny_clip(tmp_path)
    with pytest.raises(wherefrom.WherefromError, match="of 1 or 3 channels, not of 4"):
        Encoder.clip(tmp_path, "cpu").fit(Colours(channels=4))


# --- the denoiser's activations -------------------------------------------------------------------


class UNet(nn.Module):
    """Two resolutions, one of them with two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = (
            nn.Conv2d(1, 6, 3, padding=1),
            nn.Conv2d(6, 10, 3, 2, 1),
            nn.Conv2d(6, 6, 3, padding=1),
        )
        self.back, self.out = nn.Conv2d(10, 6, 1), nn.Conv2d(6, 1, 1)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        hidden = self.down(x).relu()
        deep = self.middle(hidden).relu()
        hidden = hidden + F.interpolate(self.back(deep), scale_factor=2)
        return self.out(self.up(hidden).relu())


def dit(
    process: wherefrom.Process, **changes: object
) -> tuple[wherefrom.Denoiser, wherefrom.Draws]:
    denoiser = wherefrom.Denoiser(stirred(small_dit(process=process, **changes)), process)
    return denoiser, wherefrom.Draws(process, (1, 8, 8), 3)


def unet() -> tuple[wherefrom.Denoiser, wherefrom.Draws]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        denoiser = wherefrom.Denoiser(UNet(), wherefrom.EDM(), blocks=["down", "middle", "up"])
    return denoiser, wherefrom.Draws(denoiser.process, (1, 8, 8), 3)


def mean_cosines(
    denoiser: wherefrom.Denoiser, draws: wherefrom.Draws, one: Tensor, other: Tensor, *conds: Tensor
) -> Tensor:
    """The mean over the draws of the cosines of mean-pooled streams, draw by draw."""
    total = torch.zeros(len(one), len(other))
    for draw in draws:
        pooled = []
        for x, cond in zip((one, other), conds or (None, None), strict=True):
            with torch.no_grad(), listening(Taps(denoiser, (1, 8, 8))) as streams:
                denoiser(denoiser.process.add_noise(x, draw.sigma, draw.noise), draw.sigma, cond)
            assert all(stream.ndim in (3, 4) for stream in streams)
            pooled.append(
                torch.cat([s.mean(1) if s.ndim == 3 else s.mean((2, 3)) for s in streams], 1)
            )
        total += cosines(*pooled) / len(draws)
    return total


def test_activations_are_the_mean_cosine_over_the_draws_under_every_process(process):
    denoiser, draws = dit(process)
    expected = mean_cosines(denoiser, draws, QUERIES, Noise(12).x)
    assert expected.std() > 1e-3
    method = Encoder.activations(denoiser, draws, dtype="float32")
    close(method.scores(QUERIES, Noise(12)), expected, 1e-5)
    close(method.fit(Noise(12)).scores(QUERIES, Noise(12)), expected, 1e-5)
    close(
        Encoder.activations(denoiser, draws).fit(Noise(12)).scores(QUERIES, Noise(12)),
        expected,
        1e-3,
    )


def test_a_unet_has_a_stream_for_each_resolution():
    denoiser, draws = unet()
    method = Encoder.activations(denoiser, draws)
    assert method.encode(QUERIES).shape == (5, 3 * (6 + 10))
    close(
        method.scores(QUERIES, Noise(12)), mean_cosines(denoiser, draws, QUERIES, Noise(12).x), 1e-5
    )


def test_activations_depend_on_the_condition():
    denoiser, draws = dit(wherefrom.EDM(), classes=3)
    method, labels = Encoder.activations(denoiser, draws), torch.arange(12) % 3
    expected = mean_cosines(denoiser, draws, Noise(5).x, Noise(12).x, labels[:5], labels)
    close(method.scores(Noise(5, labels=True), Noise(12, labels=True)), expected, 1e-5)
    assert not torch.allclose(
        method.encode(Noise(5).x, labels[:5]),
        method.encode(Noise(5).x, (labels[:5] + 1) % 3),
        atol=1e-3,
    )


@pytest.mark.parametrize("together", [1, 4, 1000])
def test_how_many_noised_images_go_together_does_not_matter(together, monkeypatch):
    denoiser, draws = dit(wherefrom.EDM())
    scores = Encoder.activations(denoiser, draws).scores(QUERIES, Noise(12))
    monkeypatch.setattr(activations, "_TOGETHER", together)
    close(
        Encoder.activations(denoiser, draws).scores(QUERIES, Noise(12), batch_size=5), scores, 1e-5
    )


def test_activations_leave_the_network_untouched(
    weights_equal: Callable[[nn.Module, nn.Module], bool],
):
    denoiser, draws = dit(wherefrom.EDM())
    network, state = denoiser.network.train(), torch.random.get_rng_state()
    network.patchify.weight.requires_grad_(False)
    flags = [parameter.requires_grad for parameter in network.parameters()]
    Encoder.activations(denoiser, draws).fit(Noise(6)).scores(QUERIES, Noise(6))
    assert weights_equal(network, stirred(small_dit(process=wherefrom.EDM())))
    assert network.training
    assert [parameter.requires_grad for parameter in network.parameters()] == flags
    assert not any(part._forward_hooks for part in network.modules())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_store_of_activations_belongs_to_a_denoiser_and_its_draws(tmp_path):
    denoiser, draws = dit(wherefrom.EDM())
    scores = (
        Encoder.activations(denoiser, draws)
        .fit(Noise(12), store=tmp_path)
        .scores(QUERIES, Noise(12))
    )
    evaluations: list[int] = []
    handle = denoiser.network.register_forward_hook(lambda *_: evaluations.append(1))
    again = Encoder.activations(denoiser, draws).fit(Noise(12), store=tmp_path)
    handle.remove()
    assert not evaluations
    assert torch.equal(again.scores(QUERIES, Noise(12)), scores)
    with pytest.raises(
        wherefrom.WherefromError, match="holds another table of embeddings: draws was"
    ):
        Encoder.activations(denoiser, wherefrom.Draws(denoiser.process, (1, 8, 8), 3, seed=1)).fit(
            Noise(12), store=tmp_path
        )
    other = wherefrom.Denoiser(stirred(small_dit(), 0.1), wherefrom.EDM())
    with pytest.raises(
        wherefrom.WherefromError, match="holds another table of embeddings: weights was"
    ):
        Encoder.activations(other, draws).fit(Noise(12), store=tmp_path)


def test_images_of_another_shape_than_the_draws_are_refused():
    denoiser, draws = dit(wherefrom.EDM())
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"shape \(3, 20, 20\), the draws \(1, 8, 8\): they must be alike",
    ):
        Encoder.activations(denoiser, draws).fit(Colours())
