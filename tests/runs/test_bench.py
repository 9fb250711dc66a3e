"""Claims about a bench: pictures become queries, seeds become pictures, and what a model cannot
take is refused by name.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import wherefrom
from helpers import small_dit, stirred
from pipelines import pipeline
from wherefrom.runs.bench import Bench, plain_bench
from wherefrom.runs.space import PipelineSpace


@pytest.fixture(scope="module")
def bench() -> Bench:
    """Of a small network of digits, with an index."""
    digits = torch.utils.data.Subset(wherefrom.data.digits(), range(24))
    denoiser = wherefrom.Denoiser(stirred(small_dit()), wherefrom.EDM())
    draws = wherefrom.Draws(denoiser.process, (1, 8, 8), count=2)
    tid = wherefrom.TID(denoiser, draws).fit(digits, samples=12)
    index = tid.index(digits, dim=64)
    return plain_bench(denoiser, digits, draws, collection=index, tid=tid, steps=3)


def test_a_seed_gives_the_same_picture_again(bench: Bench) -> None:
    one, two, other = (bench.sample(seed) for seed in (3, 3, 4))
    assert one.shape == (1, 1, 8, 8)
    assert one.equal(two)
    assert not one.equal(other)
    assert bench.picture(one[0]).size == (8, 8)


def test_a_picture_comes_back_as_the_query_that_it_was(bench: Bench) -> None:
    x = torch.linspace(-1, 1, 64).reshape(1, 8, 8)
    query = bench.query(bench.picture(x))
    assert torch.allclose(query, x, atol=1 / 255 + 1e-6)


def test_a_generation_can_be_traced_and_finds_what_a_search_finds(bench: Bench) -> None:
    assert bench.collection is not None
    with bench.collection.trace(bench.source, top_k=3) as trace:
        made = bench.sample(0)
    hits = bench.collection.search(made, top_k=3)
    assert trace.hits.indices.equal(hits.indices)


@pytest.mark.parametrize("cond", ["a dog", 3])
def test_a_condition_is_refused_where_the_model_takes_none(bench: Bench, cond: str | int) -> None:
    with pytest.raises(wherefrom.WherefromError, match="takes no condition"):
        bench.query(Image.new("L", (8, 8)), cond)


def test_a_negative_seed_is_refused(bench: Bench) -> None:
    with pytest.raises(wherefrom.WherefromError, match="seed must be from 0 to"):
        bench.sample(-1)


def test_classes_go_by_name_and_by_number_and_an_unknown_one_is_refused_by_the_nearest() -> None:
    network = stirred(small_dit(classes=3))
    denoiser = wherefrom.Denoiser(network, wherefrom.EDM())
    draws = wherefrom.Draws(denoiser.process, (1, 8, 8), count=2)
    images = wherefrom.data.Images(torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 2, 0]))
    bench = plain_bench(denoiser, images, draws, classes=["cat", "dog", "owl"], steps=2)
    grey = Image.new("L", (20, 12))
    assert bench.query(grey, "dog")[1] == bench.query(grey, 1)[1] == bench.query(grey, "1")[1] == 1
    assert bench.query(grey, "owl")[0].shape == (1, 8, 8)
    with pytest.raises(wherefrom.WherefromError, match="no class 'dgo': did you mean 'dog'"):
        bench.query(grey, "dgo")
    with pytest.raises(wherefrom.WherefromError, match="no class 3: there are cat, dog, owl"):
        bench.sample(0, 3)
    with pytest.raises(wherefrom.WherefromError, match="trained with classes"):
        bench.query(grey)
    assert not bench.sample(0, "cat").equal(bench.sample(0, "dog"))


@pytest.mark.parametrize("name", ["sd", "dit", "ddpm"])
def test_a_pipeline_generates_latents_whose_picture_is_the_pipeline_s_own(name: str) -> None:
    pipe = pipeline(name)
    model = wherefrom.from_pipeline(pipe)
    space = PipelineSpace(pipe, model, steps=2)
    cond = {"sd": "a dog", "dit": 1, "ddpm": None}[name]
    x = space.sample(5, cond)
    assert x.shape == (1, *model.shape)
    given = {"sd": {"prompt": "a dog"}, "dit": {"class_labels": [1]}, "ddpm": {}}[name]
    generator = torch.Generator().manual_seed(5)
    own = pipe(**given, num_inference_steps=2, generator=generator, output_type="np").images[0]
    mine = torch.from_numpy(own).permute(2, 0, 1) * 2 - 1
    pixels = torch.from_numpy(np.array(space.picture(x[0])))
    pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    assert (pixels / 127.5 - 1 - mine).abs().max() < 0.02
    found = space.query(space.picture(x[0]), cond)
    assert isinstance(found, tuple) == (name != "ddpm")
