"""Claims about pictures of any kind: the same pixels whatever holds them, one window over all, and
an identity that knows when a pixel is another.

PIL itself is the reference.
"""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from wherefrom.data import Images, cached, coco, digits, folder, huggingface
from wherefrom.data.decode import resize_image, resized_shape
from wherefrom.data.fingerprint import data_fingerprint
from wherefrom.data.pictures import pictures
from wherefrom.errors import WherefromError

SIZE = (6, 9)


def painted(count: int = 3, width: int = 16, height: int = 12, mode: str = "RGB") -> list[Any]:
    """PIL images of noise, all of one shape."""
    random = np.random.default_rng(0)
    shape = (height, width, len(mode)) if len(mode) > 1 else (height, width)
    return [Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)) for _ in range(count)]


def shown(image: Any, size: tuple[int, int] = SIZE) -> Tensor:
    """What is seen of a picture that lies across: PIL resizes it, and its middle is cut out."""
    rows, columns = size
    scale = max(rows / image.height, columns / image.width)
    across, down = int(image.width * scale + 1e-9), int(image.height * scale + 1e-9)
    small = np.array(image.convert("RGB").resize((across, down), Image.Resampling.BILINEAR))
    top, left = round((down - rows) / 2), round((across - columns) / 2)
    seen = small[top : top + rows, left : left + columns]
    return torch.from_numpy(seen).permute(2, 0, 1).float() / 127.5 - 1


def as_tensor(images: list[Any]) -> Tensor:
    """Bytes [N, C, H, W]."""
    return torch.from_numpy(np.stack([np.array(image) for image in images])).permute(0, 3, 1, 2)


def as_floats(images: list[Any]) -> Tensor:
    return as_tensor(images).float() / 127.5 - 1


def in_folder(place: Any, images: list[Any]) -> Any:
    place.mkdir(exist_ok=True)
    for number, image in enumerate(images):
        image.save(place / f"{number}.png")
    return place


def rows(images: list[Any]) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"text": ["a"] * len(images), "image": images})


def saved(place: Any, images: list[Any]) -> Any:
    rows(images).save_to_disk(place)
    return place


def opened(place: Any, images: list[Any]) -> list[Any]:
    """As PIL opens files: nothing is read yet."""
    return [Image.open(path) for path in sorted(in_folder(place, images).iterdir())]


class Own(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, images: list[Any]) -> None:
        self.x = as_floats(images)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], torch.tensor(index)


# as bytes, which PIL resizes
BYTES: dict[str, Any] = {
    "a folder": in_folder,
    "a folder's name": lambda place, images: str(in_folder(place, images)),
    "a saved data set": saved,
    "a Hugging Face data set": lambda place, images: rows(images),
    "paths": lambda place, images: sorted(in_folder(place, images).iterdir()),
    "names": lambda place, images: sorted(map(str, in_folder(place, images).iterdir())),
    "PIL images": lambda place, images: images,
    "opened files": opened,
    "arrays": lambda place, images: [np.array(image) for image in images],
    "one array": lambda place, images: np.stack([np.array(image) for image in images]),
    "a tensor of bytes": lambda place, images: as_tensor(images),
    "tensors of bytes": lambda place, images: tuple(as_tensor(images)),
    "all kinds": lambda place, images: [
        *sorted(in_folder(place, images).iterdir())[:1],
        images[1],
        np.array(images[2]),
    ],
    "Images of bytes": lambda place, images: Images(as_tensor(images), torch.arange(len(images))),
    "Images of an array": lambda place, images: Images(as_tensor(images).numpy()),
    "a folder's data set": lambda place, images: folder(in_folder(place, images)),
}
# and as floats, which torch does
FLOATS: dict[str, Any] = {
    "a tensor": lambda place, images: as_floats(images),
    "a tensor of float64": lambda place, images: as_floats(images).double(),
    "Images of floats": lambda place, images: Images(as_floats(images), torch.arange(len(images))),
    "a data set": lambda place, images: Own(images),
    "a part of one": lambda place, images: torch.utils.data.Subset(Own(images), [0, 1, 2]),
    "pairs": lambda place, images: list(Own(images)),  # type: ignore[call-overload]
}


# --- the pixels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BYTES)
def test_every_kind_of_bytes_is_seen_as_pil_shows_it(tmp_path, kind):
    images = painted()
    found = pictures(BYTES[kind](tmp_path / "some", images), SIZE)
    assert len(found) == 3
    for x, image in zip(found, images, strict=True):  # type: ignore[call-overload]
        assert isinstance(x, Tensor)
        assert x.shape == (3, *SIZE)
        assert x.dtype == torch.float32
        assert torch.allclose(x, shown(image), atol=1e-6)


@pytest.mark.parametrize("kind", FLOATS)
def test_every_kind_of_floats_is_seen_so_too_but_for_rounding(tmp_path, kind):
    images = painted()
    found = pictures(FLOATS[kind](tmp_path / "some", images), SIZE)
    assert len(found) == 3
    for x, image in zip(found, images, strict=True):  # type: ignore[call-overload]
        assert isinstance(x, Tensor)
        assert x.shape == (3, *SIZE)
        assert (x - shown(image)).abs().max() < 2 / 127.5


def test_floats_of_the_right_size_are_not_touched():
    x = as_floats(painted())
    assert torch.equal(torch.stack(list(pictures(x, (12, 16)))), x)
    assert torch.equal(pictures(x, None)[2], x[2])


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_pictures_become_of_as_many_channels_as_are_wanted(channels):
    image = painted(1, mode="L")[0]
    grey = torch.from_numpy(np.array(image))
    wanted = (grey.float() / 127.5 - 1).expand(channels, -1, -1)
    kinds = [
        [image],
        [np.array(image)],
        [np.array(image)[:, :, None]],
        grey[None, None],
        grey[None, None].float() / 127.5 - 1,
    ]
    for kind in kinds:
        assert torch.allclose(pictures(kind, None, channels)[0], wanted, atol=1e-6)


def test_what_is_transparent_lies_on_white_in_arrays_too():
    array = np.zeros((4, 4, 4), dtype=np.uint8)
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    for kind in ([array], [Image.fromarray(array)], [tensor]):
        assert torch.equal(pictures(kind, None)[0], torch.ones(3, 4, 4))


def test_a_photograph_that_pil_has_opened_stands_as_its_camera_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    painted(1)[0].save(tmp_path / "a.png", exif=exif)
    turned = pictures([Image.open(tmp_path / "a.png")], None)[0]
    assert turned.shape == (3, 16, 12)
    assert torch.equal(turned, pictures([tmp_path / "a.png"], None)[0])


def test_the_conditions_of_a_data_set_are_left_out(tmp_path):
    in_folder(tmp_path / "cat", painted())
    for source in (
        folder(tmp_path, size=6, labels=True),
        cached(folder(tmp_path, size=6, labels=True), tmp_path / "cache"),
        huggingface(rows(painted()).add_column("label", [1, 2, 3]), cond="label", size=6),
    ):
        x = pictures(source, 6)[1]
        assert isinstance(x, Tensor)
        assert torch.equal(x, source[1][0])


def test_a_data_set_without_conditions_in_this_size_is_taken_as_it_is(tmp_path):
    source = folder(in_folder(tmp_path / "some", painted()), size=6)
    assert pictures(source, 6) is source
    assert pictures(source, (6, 6)) is source
    assert pictures(source, 5) is not source


def test_a_data_set_in_another_size_shows_what_was_seen_of_it(tmp_path):
    source = folder(in_folder(tmp_path / "some", painted()), size=12)
    seen = Image.fromarray(np.array(painted()[1])[:, 2:14])
    assert torch.allclose(pictures(source, 6)[1], shown(seen, (6, 6)), atol=1e-6)


def test_grey_digits_are_rgb_in_another_size():
    assert pictures(digits(labels=True), 16)[0].shape == (3, 16, 16)


def test_pictures_can_be_sent_to_a_worker(tmp_path):
    for kind in (painted(), as_floats(painted()), Own(painted())):
        found = pictures(kind, SIZE)
        assert torch.equal(pickle.loads(pickle.dumps(found))[-1], found[2])
    many = as_tensor(painted(50))
    assert len(pickle.dumps(pictures(many, SIZE))) < 2 * many.nbytes


def test_the_only_split_is_taken_whatever_its_name_and_train_of_several(tmp_path):
    import datasets

    one = datasets.DatasetDict({"test": rows(painted(2))})
    two = datasets.DatasetDict({"test": rows(painted(2)), "train": rows(painted(3))})
    other = datasets.DatasetDict({"test": rows(painted(2)), "valid": rows(painted(3))})
    assert len(pictures(one, 6)) == 2
    assert len(pictures(two, 6)) == 3
    with pytest.raises(WherefromError, match="has no split 'train', only"):
        pictures(other, 6)
    named = datasets.Dataset.from_dict({"image": painted(2)}, split=datasets.Split.TEST)
    named.save_to_disk(tmp_path / "saved")
    assert len(pictures(tmp_path / "saved", 6)) == 2


# --- the window -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [5, 12, 31])
@pytest.mark.parametrize("height", [4, 12, 30])
@pytest.mark.parametrize("size", [(6, 9), (9, 6), (1, 20), (20, 1), (7, 7)])
def test_a_resized_picture_just_covers_the_window(width, height, size):
    found = resized_shape(height, width, size)
    assert any(side == wanted for side, wanted in zip(found, size, strict=True))
    assert all(side >= wanted for side, wanted in zip(found, size, strict=True))
    # of the same proportions, but for less than a pixel
    scale = max(wanted / side for wanted, side in zip(size, (height, width), strict=True))
    assert all(
        0 <= scale * before - after < 1 + 1e-9
        for before, after in zip((height, width), found, strict=True)
    )


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (9, 9)])
def test_a_square_pair_is_one_number(tmp_path, shape):
    image = painted(1, *shape)[0]
    assert resized_shape(image.height, image.width, (7, 7)) == resized_shape(
        image.height, image.width, 7
    )
    assert np.array_equal(np.array(resize_image(image, (7, 7))), np.array(resize_image(image, 7)))
    place = in_folder(tmp_path / "some", [image])
    one, pair = folder(place, size=7), folder(place, size=(7, 7))
    assert one.identity() == pair.identity()
    assert one.identity()["size"] == 7  # as caches that were made before have it
    assert one.fingerprint() == pair.fingerprint()
    assert torch.equal(one[0], pair[0])


def test_a_pair_is_an_identity_of_its_own_and_can_be_cached(tmp_path):
    place = in_folder(tmp_path / "some", painted())
    wide, tall = folder(place, size=(6, 9)), folder(place, size=(9, 6))
    assert wide.fingerprint() != tall.fingerprint()
    kept = cached(wide, tmp_path / "cache")
    assert torch.equal(kept[1], wide[1])
    assert torch.equal(cached(folder(place, size=[6, 9]), tmp_path / "cache")[1], wide[1])  # type: ignore[arg-type]
    with pytest.raises(WherefromError, match=r"size was \[6, 9\] and is now \[9, 6\]"):
        cached(tall, tmp_path / "cache")


def test_a_random_window_is_as_large_as_the_fixed_one(tmp_path):
    wide = folder(in_folder(tmp_path / "some", painted(1, 31, 12)), size=(6, 9))
    views = [wide.training_view(0, torch.Generator().manual_seed(seed)) for seed in range(8)]
    assert {tuple(view.shape) for view in views} == {(3, 6, 9)}
    assert len({view.sum().item() for view in views}) > 1


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((6,), "a pair is"),
        ((6, 7, 8), "a pair is"),
        ((6, 0), "give a positive number"),
        ((6, 7.5), "size must be a whole number"),
        ("6", "size must be a whole number"),
    ],
)
def test_sizes_that_no_window_has_are_refused(size, words):
    with pytest.raises(WherefromError, match=words):
        pictures(painted(), size)


# --- the identity ---------------------------------------------------------------------------------


ALL = {**BYTES, **FLOATS}


@pytest.mark.parametrize("kind", ALL)
def test_another_pixel_is_another_identity_and_the_same_pixels_are_the_same(tmp_path, kind):
    def known(place: str, images: list[Any]) -> str:
        made = ALL[kind](tmp_path / place, images)
        return data_fingerprint(pictures(made, SIZE))

    other = painted()
    other[2].putpixel((15, 11), (0, 0, 0))
    assert len({image.tobytes() for image in (*painted(), *other)}) == 4
    first = known("one", painted())
    if "saved" not in kind:  # whose place counts for the library, too
        assert known("two", painted()) == first
    assert known("three", other) != first


@pytest.mark.parametrize("kind", ["arrays", "PIL images", "a tensor", "a tensor of bytes"])
def test_a_pixel_that_is_changed_in_place_is_seen(tmp_path, kind):
    held = ALL[kind](tmp_path, painted())
    found = pictures(held, SIZE)
    before = found.fingerprint()
    if kind == "PIL images":
        held[1].putpixel((0, 0), (1, 2, 3))
    else:
        held[1][0, 0, 0] = 0 if held[1][0, 0, 0] else 1
    assert found.fingerprint() != before


def test_a_file_that_is_written_anew_is_another(tmp_path):
    place = in_folder(tmp_path / "some", painted())
    for kind in (place, sorted(place.iterdir())):
        found = pictures(kind, SIZE)
        before = found.fingerprint()
        content = (place / "1.png").read_bytes()
        (place / "1.png").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert found.fingerprint() != before


def test_order_size_and_channels_are_part_of_the_identity():
    found = [
        pictures(painted(), 6),
        pictures(painted()[::-1], 6),
        pictures(painted(), (6, 7)),
        pictures(painted(), 6, channels=1),
        pictures(painted(2), 6),
    ]
    assert len({one.fingerprint() for one in found}) == 5


def test_a_set_seen_again_is_known_by_what_it_is_of(tmp_path):
    place = in_folder(tmp_path / "some", painted())
    first = pictures(folder(place), 6).fingerprint()
    assert pictures(folder(place), 6).fingerprint() == first
    assert pictures(folder(place), 7).fingerprint() != first
    assert pictures(folder(place, size=8), 6).fingerprint() != first


# --- what is refused, and what is said ------------------------------------------------------------


def test_floats_in_another_range_are_refused_by_number():
    x = as_floats(painted())
    assert len(pictures(x * 1.04, 6)) == 3
    x[1] *= 1.2
    with pytest.raises(WherefromError, match=r"picture 1 of the list has numbers from -1\.2"):
        pictures(x, 6)
    with pytest.raises(WherefromError, match="picture 0 of the list has numbers from 0 to 255"):
        pictures(as_tensor(painted()).float(), 6)
    x[1] = torch.nan
    with pytest.raises(WherefromError, match="picture 1 of the list has numbers from nan"):
        pictures(x, 6)


def test_an_item_in_another_range_is_refused_when_it_is_read():
    own = Own(painted(40, 4, 4))
    own.x[1] *= 3
    found = pictures(own, 4)
    with pytest.raises(WherefromError, match="item 1 of the data set has numbers from"):
        found[1]


@pytest.mark.parametrize("kind", FLOATS)
def test_floats_in_0_to_1_are_said(tmp_path, kind, monkeypatch):
    monkeypatch.setitem(globals(), "as_floats", lambda images: as_tensor(images).float() / 255)
    with pytest.warns(UserWarning, match=r"lie in \[0, 1\], and are taken to lie in \[-1, 1\]"):
        pictures(FLOATS[kind](tmp_path, painted()), 6)


def test_nothing_is_said_of_floats_that_are_right_dark_bright_or_bytes():
    x = as_floats(painted())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for honest in (x, x.clamp(max=-0.5), x.clamp(min=0.3), as_tensor(painted())):
            pictures(honest, 6)
        pictures(Images(as_tensor(painted()).clamp(min=128)), 6)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], "images is empty"),
        (3, "images is int: give a folder"),
        (None, "images is NoneType: give a folder"),
        ({"a.png": 1}, "is of type dict"),
        (Image.new("RGB", (4, 4)), "images is Image: give a folder, a list"),
        ((image for image in painted()), "images is generator"),
        (torch.zeros(3, 4, 4), r"images has shape \(3, 4, 4\); it must be \[N, C, H, W\]"),
        (np.zeros((4, 4, 3)), r"images has shape \(4, 4, 3\); it must be \[N, H, W, C\]"),
        (torch.zeros(2, 5, 4, 4), r"picture 0 of the list has shape \(5, 4, 4\)"),
        (np.zeros((2, 3, 4, 4, 1), np.uint8), "images has shape"),
        (np.zeros((2, 3, 8, 8), np.uint8), r"has shape \(3, 8, 8\); an array is \[H, W\]"),
        (np.zeros((2, 4, 4, 3)), "an array of float64; give uint8 in 0..255"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.int64), "holds torch.int64; give uint8"),
        (torch.zeros(2, 4, 4, 4), "has 4 channels where 3 are wanted"),
        ([painted()[0], 5], "picture 1 of the list is int: give a folder"),
        (["nowhere.png"], "picture 0 of the list: there is no file nowhere.png"),
        ("nowhere", "nowhere is no folder: give a folder"),
    ],
)
def test_what_holds_no_pictures_is_refused(images, words):
    with pytest.raises(WherefromError, match=words):
        pictures(images, 6)


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    painted()[0].save(tmp_path / "a.png")
    with pytest.raises(WherefromError, match=r"a\.png is a file: give a folder, a list of files"):
        pictures(tmp_path / "a.png", 6)


def test_a_damaged_file_is_named_however_it_is_given(tmp_path):
    painted(1, 60, 60)[0].save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(WherefromError, match=r"a\.png cannot be decoded"):
        pictures([tmp_path / "a.png"], 6)[0]
    with pytest.raises(WherefromError, match="picture 0 of the list cannot be decoded"):
        pictures([Image.open(tmp_path / "a.png")], 6)[0]


def test_floats_are_not_cached_as_if_they_were_bytes(tmp_path):
    with pytest.raises(WherefromError, match="holds floats, which need no decoding"):
        cached(pictures(as_floats(painted()), 6), tmp_path / "cache")
    kept = cached(pictures(painted(), 6), tmp_path / "bytes")
    assert torch.equal(kept[1], pictures(painted(), 6)[1])


def test_the_sizes_of_published_sets_may_be_pairs_too(tmp_path):
    import json

    from safetensors.torch import save_file

    in_folder(tmp_path / "some", painted(1))
    notes = {
        "images": [{"id": 0, "file_name": "0.png"}],
        "annotations": [{"id": 0, "image_id": 0, "caption": "a"}],
    }
    (tmp_path / "captions.json").write_text(json.dumps(notes))
    save_file({"ids": torch.arange(1), "embeddings": torch.eye(1)}, tmp_path / "text.safetensors")
    source = coco(
        tmp_path / "some",
        tmp_path / "captions.json",
        tmp_path / "text.safetensors",
        size=SIZE,
    )
    assert torch.equal(pictures(source, SIZE)[0], source[0][0])
