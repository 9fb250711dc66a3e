"""Claims about items and batches: what is no image, no data set or no condition is refused by name,
wherever it is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom import WherefromError, baselines
from wherefrom.data.items import batches, check_batch_size, item_shape, length, read, stack_conds

EDM = wherefrom.EDM()
FLOATS = Noise(12).x
NOT_FLOATS = {
    "uint8": (127.5 * (FLOATS + 1)).to(torch.uint8),
    "bool": FLOATS > 0,
    "int64": FLOATS.long(),
    "complex64": FLOATS.to(torch.complex64),
}


def denoiser(**changes: Any) -> wherefrom.Denoiser:
    return wherefrom.Denoiser(stirred(small_dit(**changes)), EDM)


def draws(count: int = 1) -> wherefrom.Draws:
    return wherefrom.Draws(EDM, (1, 8, 8), count)


# --- images that are no floating-point numbers ----------------------------------------------------


@pytest.fixture(scope="module")
def ready() -> dict[str, Any]:
    """Something of every kind that reads images, fitted to honest ones."""
    model, data = denoiser(), Noise(12)
    tid = wherefrom.TID(model, draws()).fit(data)
    tide = wherefrom.TIDE.distill(tid, data, epochs=0.1, batch_size=4, dim=8, hidden=8, heads=2)
    return {
        "TID": tid,
        "TIDE": tide.fit(data),
        "bank": tide.index(data),
        "DTRAK": baselines.DTRAK(model, draws(), dim=64).fit(data),
        "KFAC": baselines.KFACInfluence(model, draws()).fit(data),
        "MUCS": baselines.MUCS(model, draws(), max_steps=1).fit(data),
        "Random": baselines.Random().fit(data),
        "Pixel": baselines.Pixel().fit(data),
        "Encoder": baselines.Encoder(lambda x: x.flatten(1)).fit(data),
        "activations": baselines.Encoder.activations(model, draws()).fit(data),
    }


ATTRIBUTORS = (
    *("TID", "TIDE", "DTRAK", "KFAC", "MUCS", "Random", "Pixel", "Encoder", "activations"),
)


@pytest.mark.parametrize("kind", NOT_FLOATS)
@pytest.mark.parametrize("name", ATTRIBUTORS)
def test_queries_that_are_no_floats_are_refused_by_every_attributor(ready, name, kind):
    with pytest.raises(WherefromError, match=rf"query 0 of the data set holds torch\.{kind}"):
        ready[name].scores(NOT_FLOATS[kind][:3], Noise(12))


@pytest.mark.parametrize("kind", NOT_FLOATS)
def test_queries_that_are_no_floats_are_refused_by_a_bank(ready, kind):
    for ask in (ready["bank"].search, ready["bank"].scores):
        with pytest.raises(WherefromError, match=rf"query 0 of the data set holds torch\.{kind}"):
            ask(NOT_FLOATS[kind][:3])


@pytest.mark.parametrize("kind", NOT_FLOATS)
@pytest.mark.parametrize(
    "use",
    [
        lambda x: wherefrom.train(small_dit(), EDM, list(x), 1, 4, 1e-3),
        lambda x: wherefrom.TID(denoiser(), draws()).fit(list(x)),
        lambda x: baselines.Pixel().fit(list(x)),
        lambda x: baselines.Pixel().scores(FLOATS, list(x)),
        lambda x: baselines.Encoder(lambda x: x.flatten(1)).fit(list(x)),
        lambda x: baselines.DTRAK(denoiser(), draws(), dim=64).fit(list(x)),
        lambda x: baselines.MUCS(denoiser(), draws()).fit(list(x)),
    ],
)
def test_training_images_that_are_no_floats_are_refused_everywhere(use, kind):
    with pytest.raises(WherefromError, match=rf"item 0 of the data set holds torch\.{kind}"):
        use(NOT_FLOATS[kind])


@pytest.mark.parametrize("kind", NOT_FLOATS)
def test_batches_that_are_no_floats_are_refused(ready, kind):
    x, model = NOT_FLOATS[kind], ready["TID"].denoiser
    for use in (
        lambda: ready["TID"].pairwise(x, draws()[0]),
        lambda: ready["TIDE"].embed(x),
        lambda: ready["bank"].append(list(x)),
        lambda: EDM.add_noise(x, torch.tensor(1.0), torch.randn(x.shape)),
        lambda: wherefrom.sample(model, x, steps=2),
    ):
        with pytest.raises(WherefromError, match=rf"torch\.{kind}"):
            use()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_images_of_another_precision_are_taken_in_the_networks(ready, dtype):
    exact = ready["TID"].scores(FLOATS[:2].to(dtype).float(), Noise(12))
    assert torch.allclose(ready["TID"].scores(FLOATS[:2].to(dtype), Noise(12)), exact)


def test_an_item_that_is_no_tensor_is_named():
    with pytest.raises(WherefromError, match="query 0 of the data set is ndarray"):
        baselines.Pixel().scores(FLOATS.numpy(), Noise(12))
    with pytest.raises(WherefromError, match="item 3 of the data set is NoneType"):
        read([*FLOATS[:3], None], range(4), (1, 8, 8))


# --- what is no data set --------------------------------------------------------------------------


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self):
        return iter(FLOATS)


class CountedStream(Stream):
    def __len__(self) -> int:
        return len(FLOATS)


class TooLong(Noise):
    """One whose length is longer than it has items."""

    def __len__(self) -> int:
        return len(self.x) + 4

    def __getitem__(self, index: int) -> Any:
        if index >= len(self.x):
            raise IndexError(f"no image {index}")
        return super().__getitem__(index)


class TooLongAtOnce(TooLong):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class TooFewAtOnce(Noise):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices[1:]]


UNCOUNTED = [Stream(), CountedStream(), iter(FLOATS), DataLoader(FLOATS), {0: FLOATS[0]}, 3, None]


@pytest.mark.parametrize("dataset", UNCOUNTED, ids=lambda one: type(one).__name__)
def test_what_has_no_items_by_number_is_no_data_set(ready, dataset):
    for use in (
        lambda: wherefrom.train(small_dit(), EDM, dataset, 1, 4, 1e-3),
        lambda: wherefrom.TID(denoiser(), draws()).fit(dataset),
        lambda: ready["TID"].scores(FLOATS, dataset),
        lambda: ready["TID"].attribute(dataset, Noise(12)),
        lambda: ready["bank"].search(dataset),
        lambda: ready["Pixel"].scores(dataset, Noise(12)),
        lambda: ready["TIDE"].index(dataset),
    ):
        with pytest.raises(WherefromError, match="which has no items by number: give a Dataset"):
            use()


def test_what_has_items_but_no_length_is_no_data_set():
    class Unsized:
        def __getitem__(self, index: int) -> Tensor:
            return FLOATS[index]

    for dataset in (Unsized(), torch.tensor(1.0)):
        with pytest.raises(WherefromError, match="has no length"):
            length(dataset)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [TooLong, TooLongAtOnce])
def test_a_length_that_is_too_long_is_said(tmp_path, kind):
    dataset = kind(12)
    for use in (
        lambda: wherefrom.train(small_dit(), EDM, dataset, 1, 4, 1e-3, store=tmp_path / "run"),
        lambda: wherefrom.train(small_dit(), EDM, dataset, 1, 4, 1e-3),
        lambda: wherefrom.TID(denoiser(), draws()).fit(dataset),
        lambda: baselines.Pixel().scores(FLOATS, dataset),
    ):
        with pytest.raises(
            WherefromError, match=r"says that it has 16 items, .*items? (1[2-5]|0 to 15) "
        ):
            use()


def test_fewer_items_than_were_asked_for_are_said():
    with pytest.raises(WherefromError, match="gave 3 items where 4 were asked for"):
        read(TooFewAtOnce(12), range(4), (1, 8, 8))


def test_a_batch_size_is_a_whole_number():
    assert check_batch_size(np.int64(4)) == 4
    for size in (1.5, "8", True, None):
        with pytest.raises(WherefromError, match="batch_size must be a whole number"):
            check_batch_size(size)  # type: ignore[arg-type]


# --- conditions -----------------------------------------------------------------------------------

ONE, TWO = torch.ones(2), torch.zeros(2)


@pytest.mark.parametrize(
    ("conds", "words"),
    [
        (["a cat", "a dog"], "the condition of item 0 .* is 'a cat' .str.*embed text first"),
        ([(ONE,), (TWO,)], "the condition of item 0 .*tuple"),
        ([[1, 2], [3, 4]], "the condition of item 0 .*list"),
        ([1 + 2j, 3j], "the condition of item 0 .*complex"),
        ([np.array(["a"]), np.array(["b"])], "the condition of item 0 .*ndarray"),
        ([{"a": {"b": ONE}}, {"a": {"b": ONE}}], "the condition 'a' of item 0 .*dict"),
        ([{"a": None}, {"a": None}], "the condition 'a' of item 0 .*NoneType"),
        ([ONE, torch.ones(3)], r"the condition of item 1 .*\(3,\).* that of item 0 .*\(2,\)"),
        ([ONE, torch.ones(2).long()], "item 1 .*int64, that of item 0 .*float32"),
        ([{"a": ONE}, {"a": torch.ones(3)}], "the condition 'a' of item 1 "),
        ([{"a": ONE}, {"a": ONE, "b": ONE}], r"item 1 .*keys \['a', 'b'\], item 0 .*\['a'\]"),
        ([{"a": ONE, "b": ONE}, {"a": ONE}], r"item 1 .*keys \['a'\], item 0 .*\['a', 'b'\]"),
        ([ONE, None], "item 1 .* has no condition, item 0 .* a condition"),
        ([None, ONE], "item 1 .* has a condition, item 0 .* no condition"),
        ([ONE, {"a": ONE}], "item 1 .* has a condition of the keys"),
        ([ONE, torch.full((2,), torch.nan)], "the condition of item 1 .*NaN or infinity"),
    ],
    ids=str,
)
def test_conditions_that_are_none_or_unlike_each_other_are_named(conds, words):
    items = list(zip(FLOATS, conds, strict=False))
    with pytest.raises(WherefromError, match=words):
        read(items, range(2), (1, 8, 8))
    with pytest.raises(WherefromError, match=words.replace("item", "query")):
        baselines.Pixel().scores(items, Noise(12))


def test_conditions_of_numbers_are_taken_as_tensors():
    assert torch.equal(stack_conds([1, np.int64(2), torch.tensor(3)]), torch.tensor([1, 2, 3]))
    assert torch.equal(stack_conds([np.ones(2), TWO.double()]), torch.stack([ONE, TWO]).double())
    stacked = stack_conds([{"mask": torch.tensor([True])}, {"mask": torch.tensor([False])}])
    assert torch.equal(stacked["mask"], torch.tensor([[True], [False]]))


def test_items_whose_conditions_change_between_two_batches_are_refused(ready):
    items = [(x, torch.tensor(0)) if place < 6 else x for place, x in enumerate(FLOATS)]
    assert len(list(batches(items[:6], 3))) == 2
    with pytest.raises(WherefromError, match=r"item 6 .* has no condition, item 0 .* a condition"):
        ready["TIDE"].index(items, batch_size=6)
    with pytest.raises(WherefromError, match=r"item 6 .* has no condition, item 0 .* a condition"):
        ready["TID"].scores(FLOATS, items, batch_size=6)


def test_the_shape_of_items_is_that_of_the_first():
    assert item_shape(Noise(3)) == (1, 8, 8)
