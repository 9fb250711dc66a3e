"""Claims about encoded data sets: each picture and each different caption is encoded once, whatever
ends the work, and what was made of something else is never taken for this.

The encoder is a toy: means over squares of pixels, and numbers that a digest of the text gives.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forks import killed
from wherefrom.adapters import encoded as module
from wherefrom.adapters.encoded import Encoded, encoded
from wherefrom.artefacts.lock import Lock
from wherefrom.artefacts.pace import Pace
from wherefrom.data.fingerprint import data_fingerprint
from wherefrom.data.items import read
from wherefrom.data.pictures import pictures
from wherefrom.errors import WherefromError

COUNT = 20
PROMPTS = [f"a picture of {number % 3}" for number in range(COUNT)]


def pixels(count: int = COUNT, seed: int = 0) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 8, 8), generator=numbers, dtype=torch.uint8)


def some(count: int = COUNT, seed: int = 0) -> Any:
    return pictures(pixels(count, seed), 8)


def embedding(text: Any) -> Tensor:
    """Six numbers of a text, [2, 3]."""
    digest = hashlib.sha256(str(text).encode()).digest()
    return torch.tensor(list(digest[:6])).view(2, 3) / 255


def latent(image: Tensor) -> Tensor:
    """The mean over each square of four pixels of an image of bytes [3, 8, 8]."""
    return (image.float() / 127.5 - 1).view(3, 4, 2, 4, 2).mean((2, 4))


class Toy:
    """An encoder that writes down what it was asked."""

    def __init__(self, shape: tuple[int, ...] = (3, 4, 4), **settings: Any) -> None:
        self.settings, self.shape = settings, shape
        self.images: list[Tensor] = []
        self.texts: list[Any] = []
        self.grad: list[bool] = []
        self.fails_at: int | None = None  # the batch of pictures
        self.error: BaseException = RuntimeError("out of memory")
        self.slow = 0.0

    def identity(self) -> dict[str, Any]:
        return {"vae": "toy", **self.settings}

    def latents(self, x: Tensor) -> Tensor:
        if self.fails_at == len(self.images):
            raise self.error
        self.images.append(x)
        self.grad.append(torch.is_grad_enabled())
        time.sleep(self.slow)
        return torch.nn.functional.avg_pool2d(x, 2).reshape(len(x), *self.shape)

    def conditions(self, texts: Any) -> Any:
        self.texts += texts
        return torch.stack([embedding(text) for text in texts])

    @property
    def seen(self) -> int:
        return sum(map(len, self.images))


class Dicts(Toy):
    def conditions(self, texts: Any) -> Any:
        rows = super().conditions(texts)
        return {
            "prompt_embeds": rows.to(torch.bfloat16),
            "mask": rows > 0.5,
            "pooled": rows.flatten(1),
        }


def same(one: Encoded, other: Encoded) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        for a, b in zip(one, other, strict=True)  # type: ignore[call-overload]
    )


def state(folder: Path) -> dict[str, Any]:
    path = folder / "artefact.json"
    return json.loads(path.read_text())["state"] if path.exists() else {"latents": []}


# --- what an item is ------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False])
def test_an_item_is_its_pictures_latent_and_its_captions_condition(tmp_path, kept):
    made = encoded(some(), PROMPTS, Toy(), tmp_path / "latents" if kept else None, batch_size=3)
    assert len(made) == COUNT
    for index in (0, 1, 7, COUNT - 1):
        x, cond = made[index]
        assert torch.allclose(x, latent(pixels()[index]), atol=1e-6)
        assert x.dtype == torch.float32
        assert torch.equal(cond, embedding(PROMPTS[index]))
    assert torch.equal(made[-1][0], made[COUNT - 1][0])
    with pytest.raises(IndexError):
        made[COUNT]


def test_pictures_without_captions_are_latents_alone(tmp_path):
    toy = Toy()
    made = encoded(some(), None, toy, tmp_path)
    assert torch.allclose(made[3], latent(pixels()[3]), atol=1e-6)
    assert toy.texts == []
    assert made.captions is None


def test_items_come_several_at_once_as_batches(tmp_path):
    made = encoded(some(), PROMPTS, Dicts(), tmp_path)
    x, cond = read(made, [5, 2], (3, 4, 4))
    assert x.shape == (2, 3, 4, 4)
    assert torch.equal(cond["pooled"][1], embedding(PROMPTS[2]).flatten())


def test_the_pictures_and_the_captions_are_there_still():
    source = some()
    made = encoded(source, PROMPTS, Toy())
    assert made.source is source
    assert made.captions == PROMPTS


def test_conditions_of_a_dict_keep_their_keys_and_types(tmp_path):
    made = encoded(some(), PROMPTS, Dicts(), tmp_path)
    cond = made[4][1]
    assert sorted(cond) == ["mask", "pooled", "prompt_embeds"]
    assert torch.equal(cond["prompt_embeds"], embedding(PROMPTS[4]).bfloat16())
    assert cond["mask"].dtype == torch.bool


def test_a_dict_of_one_key_is_a_dict(tmp_path):
    class OneKey(Toy):
        def conditions(self, texts: Any) -> Any:
            return {"cond": super().conditions(texts)}

    made = encoded(some(), PROMPTS, OneKey(), tmp_path)
    assert list(made[0][1]) == ["cond"]


def test_class_indices_are_captions_too():
    class Classes(Toy):
        def conditions(self, texts: Any) -> Any:
            self.texts += texts
            return torch.tensor(texts)

    toy = Classes()
    made = encoded(some(), [number % 4 for number in range(COUNT)], toy)
    assert made[6][1] == 2
    assert made[6][1].dtype == torch.int64
    assert toy.texts == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", [(48,), (6, 8), (3, 1, 4, 4)])
def test_latents_have_any_number_of_dimensions(tmp_path, shape):
    made = encoded(some(), PROMPTS, Toy(shape), tmp_path)
    assert made[9][0].shape == shape
    assert torch.allclose(made[9][0].flatten(), latent(pixels()[9]).flatten(), atol=1e-6)


def test_a_latent_that_is_changed_by_its_reader_is_not_changed_for_others(tmp_path):
    made = encoded(some(), None, Toy(), tmp_path)
    made[0].zero_()
    assert made[0].abs().sum() > 0


# --- once -----------------------------------------------------------------------------------------


def test_every_different_caption_is_encoded_and_kept_once(tmp_path):
    toy = Toy()
    encoded(some(), PROMPTS, toy, tmp_path, batch_size=2)
    assert toy.texts == ["a picture of 0", "a picture of 1", "a picture of 2"]
    kept = [load_file(path) for path in sorted(tmp_path.glob("conditions-*"))]
    assert sum(len(tensors["cond"]) for tensors in kept) == 3


def test_items_of_one_caption_share_its_memory(tmp_path):
    made = encoded(some(), PROMPTS, Toy(), tmp_path)
    assert made[0][1].data_ptr() == made[3][1].data_ptr() != made[1][1].data_ptr()


def test_what_is_finished_is_read_and_not_encoded_again(tmp_path):
    first = encoded(some(), PROMPTS, Toy(), tmp_path)
    toy = Toy()
    again = encoded(some(), PROMPTS, toy, tmp_path)
    assert (toy.seen, toy.texts) == (0, [])
    assert same(first, again)


def test_encoding_takes_no_gradients():
    toy = Toy()
    encoded(some(), None, toy)
    assert toy.grad
    assert not any(toy.grad)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_size_of_batches_changes_nothing_but_rounding(size):
    one, other = encoded(some(), PROMPTS, Toy(), batch_size=size), encoded(some(), PROMPTS, Toy())
    for a, b in zip(one, other, strict=True):  # type: ignore[call-overload]
        assert torch.allclose(a[0], b[0], atol=1e-6)


def test_files_are_of_few_items_and_no_more_is_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHARD_ITEMS", 4)
    given: list[weakref.ref[Any]] = []  # of the memory, which other tensors may share
    alive = []

    class Counting(Toy):
        def latents(self, x: Tensor) -> Tensor:
            alive.append(sum(len(x) for one in given if one() is not None))
            found = super().latents(x)
            given.append(weakref.ref(found.untyped_storage()))
            return found

    made = encoded(some(24), None, Counting(), tmp_path, batch_size=2)
    assert state(tmp_path)["latents"] == [4] * 6
    assert len(list(tmp_path.glob("latents-*.safetensors"))) == 6
    assert 0 < max(alive) <= 6, alive
    assert torch.allclose(made[21], latent(pixels(24)[21]), atol=1e-6)


def test_large_latents_lie_in_smaller_files(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHARD_BYTES", 5 * 48 * 4)
    encoded(some(), None, Toy(), tmp_path, batch_size=1)
    assert state(tmp_path)["latents"] == [5] * 4


# --- what ends the work ---------------------------------------------------------------------------


def test_what_was_encoded_before_an_error_is_not_encoded_again(tmp_path):
    toy = Toy()
    toy.fails_at = 3
    with pytest.raises(RuntimeError, match="out of memory"):
        encoded(some(), PROMPTS, toy, tmp_path, batch_size=4)
    rest = Toy()
    made = encoded(some(), PROMPTS, rest, tmp_path, batch_size=4)
    assert (toy.seen, rest.seen) == (12, 8)
    assert rest.texts == []
    assert same(made, encoded(some(), PROMPTS, Toy(), batch_size=4))


def test_captions_that_were_encoded_before_an_error_are_not_encoded_again(tmp_path):
    texts = [f"caption {number}" for number in range(COUNT)]

    class Failing(Toy):
        def conditions(self, texts: Any) -> Any:
            if "caption 9" in texts:
                raise RuntimeError("out of memory")
            return super().conditions(texts)

    with pytest.raises(RuntimeError):
        encoded(some(), texts, Failing(), tmp_path, batch_size=4)
    rest = Toy()
    made = encoded(some(), texts, rest, tmp_path, batch_size=4)
    assert rest.texts == texts[8:]
    assert torch.equal(made[3][1], embedding(texts[3]))


def test_work_that_goes_on_keeps_its_batches(tmp_path):
    toy = Toy()
    toy.fails_at = 2
    with pytest.raises(RuntimeError):
        encoded(some(), None, toy, tmp_path, batch_size=4)
    rest = Toy()
    encoded(some(), None, rest, tmp_path, batch_size=5)
    assert [len(x) for x in rest.images] == [4, 4, 4]


def test_ctrl_c_leaves_what_was_done(tmp_path):
    class Interrupted(Toy):
        def latents(self, x: Tensor) -> Tensor:
            if len(self.images) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return super().latents(x)

    toy = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        encoded(some(), PROMPTS, toy, tmp_path, batch_size=4)
    assert sum(state(tmp_path)["latents"]) == toy.seen == 12


def test_work_that_was_killed_goes_on_to_the_same_items(tmp_path):
    toy = Toy()
    toy.slow = 0.05
    killed(
        lambda: encoded(some(), PROMPTS, toy, tmp_path, batch_size=1),
        lambda: sum(state(tmp_path)["latents"]) >= 5,
    )
    kept, rest = sum(state(tmp_path)["latents"]), Toy()
    assert 5 <= kept < COUNT
    made = encoded(some(), PROMPTS, rest, tmp_path)
    assert rest.seen == COUNT - kept
    assert rest.texts == []
    assert same(made, encoded(some(), PROMPTS, Toy(), batch_size=1))


def test_a_batch_is_kept_whenever_it_is_time(tmp_path, monkeypatch):
    monkeypatch.setattr(Pace, "seconds", 0.0)
    monkeypatch.setattr(Pace, "times", 0.0)
    encoded(some(), None, Toy(), tmp_path, batch_size=5)
    assert state(tmp_path)["latents"] == [5, 5, 5, 5]


def test_two_do_not_encode_into_one_folder_at_once(tmp_path):
    lock = Lock.take(tmp_path / ".encoding.lock")
    with pytest.raises(WherefromError, match="somebody else is encoding into"):
        encoded(some(), None, Toy(), tmp_path)
    lock.release()
    assert len(encoded(some(), None, Toy(), tmp_path)) == COUNT


def test_a_picture_that_cannot_be_read_is_named_and_those_before_it_are_kept(
    tmp_path, write_images
):
    paths = write_images(6)
    source = pictures(paths, 8)
    paths[4].write_text("no picture")
    with pytest.raises(WherefromError, match=r"4\.png cannot be decoded"):
        encoded(source, None, Toy(), tmp_path / "latents", batch_size=2)
    assert sum(state(tmp_path / "latents")["latents"]) == 4


# --- what is another one --------------------------------------------------------------------------


OTHERS = {
    "pictures": (lambda: some(seed=1), PROMPTS, {}, "pictures was another one"),
    "captions": (some, ["b", *PROMPTS[1:]], {}, "captions was another one"),
    "no captions": (some, None, {}, "captions was '.*' and is now None"),
    "encoder": (some, PROMPTS, {"vae": "other"}, "vae of the encoder was 'toy' and is now 'other'"),
    "settings": (some, PROMPTS, {"scale": 2}, "scale of the encoder was None and is now 2"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_folder_of_something_else_is_refused_and_has_another_fingerprint(tmp_path, what):
    source, captions, settings, words = OTHERS[what]
    first = encoded(some(), PROMPTS, Toy(), tmp_path)
    with pytest.raises(WherefromError, match=f"holds another encoded data set: {words}"):
        encoded(source(), captions, Toy(**settings), tmp_path)
    other = encoded(source(), captions, Toy(**settings))
    assert data_fingerprint(other) != data_fingerprint(first)


def test_captions_in_another_order_are_others():
    texts = ["a", "b"]
    one, other = encoded(some(2), texts, Toy()), encoded(some(2), texts[::-1], Toy())
    assert one.fingerprint() != other.fingerprint()


def test_the_fingerprint_reads_no_latents(tmp_path):
    made = encoded(some(), PROMPTS, Toy(), tmp_path)
    before = made.fingerprint()
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert made.fingerprint() == before == encoded(some(), PROMPTS, Toy()).fingerprint()


def test_damage_is_named(tmp_path):
    encoded(some(), PROMPTS, Toy(), tmp_path)
    path = tmp_path / "latents-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(WherefromError, match=r"latents-00000\.safetensors is not what was written"):
        encoded(some(), PROMPTS, Toy(), tmp_path)[0]


def test_it_can_be_sent_to_a_worker_without_what_it_holds(tmp_path):
    small = {
        kept: encoded(some(2), ["a", "b"], Toy(), tmp_path / "kept" if kept else None)
        for kept in (True, False)
    }
    for made in small.values():
        assert torch.equal(made[1][1], embedding("b"))
        assert same(pickle.loads(pickle.dumps(made)), made)
    made = small[True]
    sent = pickle.dumps(made)
    assert made[0][0].numpy().tobytes() not in sent
    encoded(some(3), None, Toy(), tmp_path / "other")
    (tmp_path / "other" / "artefact.json").replace(tmp_path / "kept" / "artefact.json")
    with pytest.raises(WherefromError, match="is of another data set"):
        pickle.loads(sent)


# --- what is refused ------------------------------------------------------------------------------


def test_a_picture_whose_latent_overflows_is_named(tmp_path, write_images):
    class Overflowing(Toy):
        def latents(self, x: Tensor) -> Tensor:
            found = super().latents(x)
            found[-1, 0] = torch.inf
            return found

    sentence = "encoded to NaN or infinity: a VAE overflows in float16; load it in float32"
    with pytest.raises(WherefromError, match=f"picture 3 is {sentence}"):
        encoded(some(), None, Overflowing(), batch_size=4)
    for source in (pictures(write_images(3), 8), pictures(tmp_path / "pictures", 8)):
        with pytest.raises(WherefromError, match=r"picture 1 \(.*1\.png\) is encoded to NaN"):
            encoded(source, None, Overflowing(), batch_size=2)


def test_a_caption_whose_condition_overflows_is_named():
    class Overflowing(Toy):
        def conditions(self, texts: Any) -> Any:
            found = super().conditions(texts)
            found[texts.index("a picture of 1")] = torch.nan
            return found

    with pytest.raises(WherefromError, match="the caption 'a picture of 1' is encoded to NaN"):
        encoded(some(), PROMPTS, Overflowing())


def test_conditions_of_several_lengths_are_refused():
    class Ragged(Toy):
        def conditions(self, texts: Any) -> Any:
            return torch.zeros(len(texts), max(map(len, texts)), 2)

    with pytest.raises(WherefromError, match="all must be alike, texts padded to one length"):
        encoded(some(2), ["a", "longer"], Ragged(), batch_size=1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "makes no conditions of captions: give captions=None"),
        ({}, "makes no conditions of captions"),
        (torch.zeros(1, 2), r"gives has shape \(1, 2\) for 3 images"),
        ([1, 2], "is list; the condition of a batch is a tensor"),
    ],
)
def test_an_encoder_that_gives_no_row_for_each_caption_is_refused(given, words):
    toy = Toy()
    toy.conditions = lambda texts: given  # type: ignore[method-assign]
    with pytest.raises(WherefromError, match=words):
        encoded(some(), PROMPTS, toy)


def test_an_encoder_that_gives_no_latent_for_each_picture_is_refused():
    toy = Toy()
    toy.latents = lambda x: x[:1]  # type: ignore[method-assign]
    with pytest.raises(WherefromError, match=r"gave \(1, 3, 8, 8\) for 16 pictures"):
        encoded(some(), None, toy)


def test_captions_that_are_not_one_for_each_picture_are_refused():
    with pytest.raises(WherefromError, match="there are 2 captions for 20 pictures"):
        encoded(some(), ["a", "b"], Toy())
    with pytest.raises(WherefromError, match=r"caption 1 is None \(NoneType\)"):
        encoded(some(2), ["a", None], Toy())  # type: ignore[list-item]


def test_pictures_of_several_shapes_are_named():
    images = [image[:, :, : 8 - number] for number, image in enumerate(pixels(2))]
    with pytest.raises(WherefromError, match="picture 1 of the data set has shape"):
        encoded(pictures(images, None), None, Toy())


@pytest.fixture
def write_images(tmp_path):
    """Write pictures of 8 x 8 and return their paths."""
    from PIL import Image

    def write(count: int) -> list[Path]:
        paths = [tmp_path / "pictures" / f"{number}.png" for number in range(count)]
        (tmp_path / "pictures").mkdir(exist_ok=True)
        for path, image in zip(paths, pixels(count), strict=True):
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
        return paths

    return write
