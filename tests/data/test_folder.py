"""Claims about folders of images, and about the two views that all lazily decoded sets share.

The fixed view is a centre crop; the training view is a random crop that depends on the generator
alone.
"""

from __future__ import annotations

import errno
import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from wherefrom.artefacts.files import check_readable
from wherefrom.data import cached, folder
from wherefrom.data.items import Viewed
from wherefrom.errors import WherefromError


def as_x(image: Image.Image) -> torch.Tensor:
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 - 0.5) / 0.5


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_image_is_found_in_the_order_of_its_path(tmp_path, write_image):
    names = [
        "b/one.PNG",
        "a/two.jpg",
        "three.bmp",
        "b/deep/four.webp",
        "five.TIFF",
        "six.gif",
        "seven.jpeg",
        "e.tif",
    ]
    for name in names:
        write_image(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not an image")
    dataset = folder(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in dataset.paths] == sorted(names)
    assert len(dataset) == len(names)
    assert all(x.shape == (3, 9, 12) for x in dataset)


def test_hidden_files_are_left_out(tmp_path, write_image):
    for name in ("a.png", ".hidden/b.png", "._a.png"):
        write_image(tmp_path / name)
    assert [path.name for path in folder(tmp_path).paths] == ["a.png"]


def test_a_linked_folder_counts_as_a_folder(tmp_path, write_image):
    write_image(tmp_path / "elsewhere/a.png")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/cat").symlink_to(tmp_path / "elsewhere")
    assert folder(tmp_path / "pictures", labels=True).classes == ["cat"]


def test_without_a_size_an_image_stays_as_it_is(tmp_path, write_image):
    image = write_image(tmp_path / "a.png")
    dataset = folder(tmp_path)
    assert torch.equal(dataset[0], as_x(image))
    assert torch.equal(dataset.training_view(0, seeded(0)), as_x(image))


def test_with_one_channel_an_image_is_grey(tmp_path, write_image):
    image = write_image(tmp_path / "a.png")
    assert torch.equal(folder(tmp_path, channels=1)[0], as_x(image.convert("L").convert("RGB"))[:1])


@pytest.mark.parametrize(("width", "height"), [(13, 6), (6, 13), (11, 6), (14, 6)])
def test_the_fixed_view_is_the_centre_of_the_resized_image(tmp_path, write_image, width, height):
    image = write_image(tmp_path / "a.png", width, height)
    longer = int(4 * max(width, height) / 6)
    start = round((longer - 4) / 2)
    wide = width > height
    resized = image.resize((longer, 4) if wide else (4, longer), Image.Resampling.BILINEAR)
    expected = as_x(resized.crop((start, 0, start + 4, 4) if wide else (0, start, 4, start + 4)))
    assert torch.equal(folder(tmp_path, size=4)[0], expected)


def test_the_training_view_is_some_window_of_the_resized_image_and_every_window_comes_up(
    tmp_path, write_image
):
    image = write_image(tmp_path / "a.png", 14, 8)
    whole = as_x(image.resize((7, 4), Image.Resampling.BILINEAR))
    windows = [whole[:, :, left : left + 4] for left in range(4)]
    dataset, generator = folder(tmp_path, size=4), seeded(0)
    seen = set()
    for _ in range(60):
        x = dataset.training_view(0, generator)
        seen.add(next(left for left, window in enumerate(windows) if torch.equal(x, window)))
    assert seen == {0, 1, 2, 3}


def test_the_training_view_depends_on_the_generator_alone(tmp_path, write_image):
    write_image(tmp_path / "a.png", 40, 8)
    dataset = folder(tmp_path, size=4)
    assert isinstance(dataset, Viewed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = dataset.training_view(0, seeded(5))
        torch.manual_seed(2)
        assert torch.equal(first, dataset.training_view(0, seeded(5)))
    others = [dataset.training_view(0, seeded(seed)) for seed in range(6, 10)]
    assert any(not torch.equal(first, other) for other in others)


def test_every_image_takes_the_same_number_of_random_numbers(tmp_path, write_image):
    for name, width in (("a.png", 40), ("b.png", 8)):
        write_image(tmp_path / name, width, 8)
    states = []
    for dataset in (folder(tmp_path, size=4), folder(tmp_path)):
        for index in range(2):
            generator = seeded(3)
            dataset.training_view(index, generator)
            states.append(generator.get_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_classes_are_the_first_level_folders_in_order(tmp_path, write_image):
    for name in ("dog/a.png", "cat/z.png", "cat/more/b.png"):
        write_image(tmp_path / name)
    dataset = folder(tmp_path, labels=True)
    assert dataset.classes == ["cat", "dog"]
    assert [int(label) for _, label in dataset] == [0, 0, 1]
    assert dataset[0][1].dtype == torch.int64


def test_a_class_keeps_its_number_though_its_images_are_left_out(tmp_path, write_image):
    for name in ("a/1.png", "b/1.png", "c/1.png"):
        write_image(tmp_path / name, 4, 4)
    whole = folder(tmp_path, labels=True)
    rest = whole.without([0])
    assert [int(rest[n][1]) for n in range(2)] == [1, 2]
    assert rest.classes == ["a", "b", "c"]
    assert list(rest.indices) == [1, 2]
    assert rest.fingerprint() != whole.fingerprint()
    assert [len(whole), whole.labels] == [3, [0, 1, 2]]


def test_an_image_outside_every_class_is_named(tmp_path, write_image):
    write_image(tmp_path / "cat/a.png")
    write_image(tmp_path / "stray.png")
    with pytest.raises(WherefromError, match=r"stray\.png lies in no subfolder"):
        folder(tmp_path, labels=True)


def test_a_folder_without_images_is_refused(tmp_path):
    with pytest.raises(WherefromError, match="holds no images"):
        folder(tmp_path)
    with pytest.raises(WherefromError, match=r"there is no folder .*nowhere"):
        folder(tmp_path / "nowhere")


def test_a_file_that_is_no_image_is_named_when_it_is_read(tmp_path):
    (tmp_path / "fake.png").write_text("not an image")
    dataset = folder(tmp_path)
    with pytest.raises(WherefromError, match=r"fake\.png cannot be decoded"):
        dataset[0]


def test_sizes_and_channels_that_no_image_has_are_refused(tmp_path, write_image):
    write_image(tmp_path / "a.png")
    with pytest.raises(WherefromError, match="channels is 4"):
        folder(tmp_path, channels=4)
    with pytest.raises(WherefromError, match="size is 0"):
        folder(tmp_path, size=0)


def test_a_folder_can_be_sent_to_a_worker(tmp_path, write_image):
    write_image(tmp_path / "cat/a.png")
    dataset = folder(tmp_path, size=4, labels=True)
    sent = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(sent[-1][0], dataset[0][0])
    assert sent[0][1] == dataset[0][1]


# --- as a viewer shows them -----------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jfif", "jpe", "JFIF"])
def test_every_name_of_a_jpeg_is_taken(tmp_path, write_image, suffix):
    write_image(tmp_path / "a.jpg")
    (tmp_path / "a.jpg").rename(tmp_path / f"a.{suffix}")
    assert [path.name for path in folder(tmp_path).paths] == [f"a.{suffix}"]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_lies_on_white(tmp_path, mode, channels):
    clear, half, solid = (200, 10, 10, 0), (0, 0, 0, 128), (255, 0, 0, 255)
    image = Image.new("RGBA", (3, 1))
    image.putdata([clear, half, solid])
    if mode == "P":
        image = Image.new("P", (3, 1))
        image.putpalette([200, 10, 10, 0, 0, 0, 255, 0, 0])
        image.putdata([0, 1, 2])
        image.info["transparency"] = bytes([0, 128, 255])
    elif mode == "LA":
        image = image.convert("LA")
    image.save(tmp_path / "a.png")
    red = {"RGBA": (255, 0, 0), "P": (255, 0, 0), "LA": (76, 76, 76)}[mode]
    expected = Image.new("RGB", (3, 1))
    expected.putdata([(255, 255, 255), (127, 127, 127), red])
    wanted = as_x(expected.convert("L").convert("RGB"))[:1] if channels == 1 else as_x(expected)
    assert torch.equal(folder(tmp_path, channels=channels)[0], wanted)


@pytest.mark.parametrize("orientation", range(2, 9))
def test_a_photograph_stands_as_its_camera_says(tmp_path, write_image, orientation):
    upright = write_image(tmp_path / "straight" / "a.png")
    ways = Image.Transpose
    # how the camera must have stored it, for the mark to bring it back
    stored = {
        2: ways.FLIP_LEFT_RIGHT,
        3: ways.ROTATE_180,
        4: ways.FLIP_TOP_BOTTOM,
        5: ways.TRANSPOSE,
        6: ways.ROTATE_90,
        7: ways.TRANSVERSE,
        8: ways.ROTATE_270,
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright.transpose(stored[orientation]).save(tmp_path / "a.png", exif=exif)
    turned = folder(tmp_path)
    assert torch.equal(turned[0], as_x(upright))
    assert torch.equal(turned[0], turned[1])


def test_a_copy_that_was_decoded_otherwise_is_not_taken_for_this_one(
    tmp_path, write_image, monkeypatch
):
    write_image(tmp_path / "images/a.png")
    with monkeypatch.context() as patch:
        patch.setattr("wherefrom.data.lazy.DECODED", "as stored")
        cached(folder(tmp_path / "images"), tmp_path / "cache")
    with pytest.raises(WherefromError, match="decoded was 'as stored'"):
        cached(folder(tmp_path / "images"), tmp_path / "cache")


# --- links and permissions ------------------------------------------------------------------------


def test_links_that_lead_round_are_followed_once(tmp_path, write_image):
    write_image(tmp_path / "one/a.png")
    write_image(tmp_path / "two/b.png")
    (tmp_path / "one/up").symlink_to(tmp_path)
    (tmp_path / "one/self").symlink_to(tmp_path / "one")
    (tmp_path / "one/over").symlink_to(tmp_path / "two")
    (tmp_path / "two/back").symlink_to(tmp_path / "one")
    found = [path.relative_to(tmp_path).as_posix() for path in folder(tmp_path).paths]
    assert found == ["one/a.png", "two/b.png"]


def test_a_link_to_itself_is_named_when_it_is_read(tmp_path, write_image):
    write_image(tmp_path / "a.png")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    dataset = folder(tmp_path)
    assert len(dataset) == 2
    with pytest.raises(WherefromError, match=r"loop\.png cannot be read \(.*symbolic links"):
        dataset[1]


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, write_image, monkeypatch):
    write_image(tmp_path / "a.png")
    dataset = folder(tmp_path)

    def forbidden(name: str, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(name))

    monkeypatch.setattr("PIL.Image.builtins.open", forbidden)  # root may read everything
    with pytest.raises(WherefromError, match=r"a\.png may not be read .*permissions") as caught:
        dataset[0]
    assert "mend" not in str(caught.value)


def test_a_file_that_the_disk_does_not_give_is_not_called_damaged(
    tmp_path, write_image, monkeypatch
):
    write_image(tmp_path / "a.png")
    dataset = folder(tmp_path)

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("PIL.Image.builtins.open", failing)
    with pytest.raises(WherefromError, match=r"a\.png cannot be read \(Input/output error\)"):
        dataset[0]


def test_a_folder_that_may_not_be_read_is_named_not_left_out(tmp_path, write_image, monkeypatch):
    write_image(tmp_path / "a.png")
    write_image(tmp_path / "locked/b.png")
    listed = os.scandir

    def forbidden(place: object) -> object:
        if str(place).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(place)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", forbidden)
    with pytest.raises(WherefromError, match=r"locked cannot be read \(Permission denied\)"):
        folder(tmp_path)


def test_labels_and_sizes_of_other_types_are_refused(tmp_path, write_image):
    write_image(tmp_path / "a.png")
    with pytest.raises(WherefromError, match="labels must be True or False, not 'no'"):
        folder(tmp_path, labels="no")  # type: ignore[arg-type]
    with pytest.raises(WherefromError, match=r"size must be a whole number, not 4\.5"):
        folder(tmp_path, size=4.5)  # type: ignore[arg-type]


def test_pictures_of_formats_that_are_not_read_are_counted_by_their_suffix(tmp_path, write_image):
    write_image(tmp_path / "a.png")
    for name in ("b.avif", "c/d.HEIC", "c/e.heic", "notes.txt", ".hidden.avif"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"left out \(1 \.avif, 2 \.heic\)"):
        assert len(folder(tmp_path)) == 1
    (tmp_path / "a.png").unlink()
    with pytest.raises(WherefromError, match=r"holds no images .*, only 1 \.avif, 2 \.heic"):
        folder(tmp_path)


def test_a_folder_that_links_lead_to_again_is_visited_once(tmp_path, write_image):
    for name in ("a/one.png", "b/two.png", "b/deep/three.png"):
        write_image(tmp_path / name)
    for number in range(12):  # each round would find the others again
        (tmp_path / f"b/loop{number}").symlink_to(tmp_path)
        (tmp_path / f"a/{number}").symlink_to(tmp_path / "b")
    (tmp_path / "A-link").symlink_to(tmp_path / "b/deep")  # its own name comes before a link's
    found = [path.relative_to(tmp_path).as_posix() for path in folder(tmp_path).paths]
    assert found == ["a/one.png", "b/deep/three.png", "b/two.png"]


def test_of_two_links_to_a_folder_elsewhere_the_first_by_name_counts(tmp_path, write_image):
    write_image(tmp_path / "elsewhere/a.png")
    (tmp_path / "pictures").mkdir()
    for name in ("z", "m", "k"):
        (tmp_path / "pictures" / name).symlink_to(tmp_path / "elsewhere")
    assert folder(tmp_path / "pictures", labels=True).classes == ["k"]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path, write_image):
    write_image(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    dataset = folder(tmp_path)
    dataset.fingerprint()
    with pytest.raises(WherefromError, match=r"b\.png is a pipe or a device"):
        dataset[1]
    with pytest.raises(WherefromError, match=r"b\.png is a pipe or a device"):
        check_readable(tmp_path / "b.png")


@pytest.mark.parametrize("size", [10**10, (8, 10**10)])
def test_a_size_that_no_memory_holds_is_refused_in_a_sentence(tmp_path, write_image, size):
    write_image(tmp_path / "a.png")
    with pytest.raises(WherefromError, match="size must be at most 16384, not 10000000000"):
        folder(tmp_path, size=size)
