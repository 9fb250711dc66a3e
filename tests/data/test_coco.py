"""Claims about COCO: which caption an item carries, and what is said when a caption or an embedding
is missing.

Annotations are interleaved between images, as in the real files.
"""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.nn.functional import normalize

from wherefrom.data import coco
from wherefrom.data.decode import to_bytes
from wherefrom.errors import WherefromError

IMAGES = [{"id": 7, "file_name": "b.jpg"}, {"id": 3, "file_name": "a.jpg"}]
NOTES = [
    {"id": 50, "image_id": 3, "caption": "a cat"},
    {"id": 10, "image_id": 7, "caption": "a boat"},
    {"id": 40, "image_id": 3, "caption": "a sleeping cat"},
    {"id": 20, "image_id": 3, "caption": "a pet"},
]
IDS = torch.tensor([10, 20, 40, 50])
VECTORS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) * 3


@pytest.fixture
def release(tmp_path, write_image):
    """Two images, the second with three captions."""
    write_image(tmp_path / "images/a.jpg", 30, 10, 1)
    write_image(tmp_path / "images/b.jpg", 10, 20, 2)
    return write_release(tmp_path)


def write_release(folder, images=IMAGES, notes=NOTES, ids=IDS, vectors=VECTORS):
    (folder / "captions.json").write_text(json.dumps({"images": images, "annotations": notes}))
    save_file({"ids": ids, "embeddings": vectors}, folder / "text.safetensors")
    return folder / "images", folder / "captions.json", folder / "text.safetensors"


def test_items_and_captions_keep_the_order_of_the_file(release):
    dataset = coco(*release, size=4)
    assert len(dataset) == 2
    assert [path.name for path in dataset.paths] == ["b.jpg", "a.jpg"]
    assert dataset.captions == [["a boat"], ["a cat", "a sleeping cat", "a pet"]]


def test_the_fixed_view_is_a_centre_crop_with_the_first_caption_in_the_file(release):
    x, cond = coco(*release, size=4)[1]
    with Image.open(release[0] / "a.jpg") as image:
        whole = to_bytes(image.resize((12, 4), Image.Resampling.BILINEAR))
    assert torch.equal(x, (whole[:, :, 4:8].float() / 255 - 0.5) / 0.5)
    assert torch.allclose(cond, VECTORS[3] / VECTORS[3].norm())


def test_the_training_view_takes_every_caption_sooner_or_later(release):
    dataset, generator = coco(*release, size=4), torch.Generator().manual_seed(0)
    wanted = normalize(VECTORS[[3, 2, 1]])
    views = [dataset.training_view(1, generator) for _ in range(40)]
    assert {int((wanted @ cond).argmax()) for _, cond in views} == {0, 1, 2}
    assert all(torch.isclose(cond.norm(), torch.tensor(1.0)) for _, cond in views)
    assert len({tuple(x.flatten().tolist()) for x, _ in views}) > 1


def test_the_training_view_is_a_function_of_the_generator(release):
    dataset = coco(*release, size=4)
    first, second = (dataset.training_view(1, torch.Generator().manual_seed(9)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_image_with_one_caption_takes_as_many_random_numbers_as_one_with_three(release):
    dataset, states = coco(*release, size=4), []
    for index in range(2):
        generator = torch.Generator().manual_seed(1)
        dataset.training_view(index, generator)
        states.append(generator.get_state())
    assert torch.equal(*states)


def test_half_precision_embeddings_are_normalised_in_single_precision(release):
    write_release(release[0].parent, vectors=VECTORS.half())
    cond = coco(*release, size=4)[0][1]
    assert torch.equal(cond, normalize(VECTORS[0].half().float(), dim=0))


def test_the_set_can_be_sent_to_a_worker_after_it_was_read(release):
    dataset = coco(*release, size=4)
    item = dataset[1]
    sent = pickle.loads(pickle.dumps(dataset))
    assert all(torch.equal(a, b) for a, b in zip(sent[1], item, strict=True))


def test_an_image_without_a_caption_is_named(release):
    write_release(release[0].parent, notes=NOTES[:1])
    with pytest.raises(WherefromError, match=r"the image b\.jpg has no caption"):
        coco(*release)


def test_an_annotation_without_an_embedding_is_named(release):
    write_release(release[0].parent, ids=torch.tensor([10, 20, 41, 50]))
    with pytest.raises(WherefromError, match="annotation 40 has no embedding"):
        coco(*release)


def test_an_annotation_of_an_unlisted_image_is_named(release):
    write_release(release[0].parent, images=IMAGES[1:])
    with pytest.raises(
        WherefromError, match=r"annotation 10 of .* is of image 7, which the file does not list"
    ):
        coco(*release)


def test_an_image_listed_twice_is_refused(release):
    write_release(release[0].parent, images=[*IMAGES, IMAGES[0]])
    with pytest.raises(WherefromError, match="lists an image id twice"):
        coco(*release)


@pytest.mark.parametrize(
    "content", ["not json", "[]", '{"images": [{"id": 1}], "annotations": []}']
)
def test_a_file_that_is_no_caption_file_is_refused(release, content):
    release[1].write_text(content)
    with pytest.raises(WherefromError, match=r"captions\.json is not a COCO caption file"):
        coco(*release)


def test_a_file_that_holds_no_embeddings_is_refused(release):
    save_file({"vectors": VECTORS}, release[2])
    with pytest.raises(WherefromError, match="with the tensors ids"):
        coco(*release)
    save_file({"ids": IDS[:2], "embeddings": VECTORS}, release[2])
    with pytest.raises(WherefromError, match=r"has ids \[2\] and embeddings \[4, 6\]"):
        coco(*release)
    release[2].write_bytes(b"not safetensors")
    with pytest.raises(WherefromError, match=r"text\.safetensors cannot be read"):
        coco(*release)


def test_missing_files_are_named(release):
    images, captions, embeddings = release
    with pytest.raises(WherefromError, match="there is no folder"):
        coco(images / "nowhere", captions, embeddings)
    with pytest.raises(WherefromError, match="there is no file of captions"):
        coco(images, images / "nowhere.json", embeddings)
    with pytest.raises(WherefromError, match="there is no file of text embeddings"):
        coco(images, captions, images / "nowhere.safetensors")
    (images / "a.jpg").unlink()
    with pytest.raises(WherefromError, match=r"there is no file .*a\.jpg"):
        coco(*release)[1]
