"""Claims about the embeddings of captions: they are CLIP's, in the file that `coco` reads, and need
no caption's neighbours.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from wherefrom.data import coco, embed_captions
from wherefrom.errors import WherefromError

transformers = pytest.importorskip("transformers")

NOTES = [
    {"id": 8, "image_id": 1, "caption": "a cat"},
    {"id": 5, "image_id": 1, "caption": "a very long caption of a cat that sleeps"},
    {"id": 6, "image_id": 1, "caption": "dog"},
]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CLIP and a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("clip")
    letters = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    words = {
        word: number for number, word in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])
    }
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    transformers.CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=20
    ).save_pretrained(folder)
    size = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "projection_dim": 8,
    }
    ends = {"bos_token_id": words["<|startoftext|>"], "eos_token_id": words["<|endoftext|>"]}
    text = {**size, **ends, "vocab_size": len(words), "max_position_embeddings": 20}
    vision = {**size, "image_size": 32, "patch_size": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.CLIPModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    path = tmp_path / "captions.json"
    path.write_text(json.dumps({"images": [{"id": 1, "file_name": "a.png"}], "annotations": NOTES}))
    return path


def test_each_caption_has_the_embedding_that_it_has_alone(
    clip: Path, captions: Path, tmp_path: Path
) -> None:
    embed_captions(captions, tmp_path / "all.safetensors", clip, device="cpu")
    embed_captions(captions, tmp_path / "one.safetensors", clip, batch_size=1, device="cpu")
    found, alone = (load_file(tmp_path / f"{name}.safetensors") for name in ("all", "one"))
    assert found["ids"].tolist() == [8, 5, 6]
    torch.testing.assert_close(found["embeddings"], alone["embeddings"], rtol=1e-4, atol=1e-6)
    network = transformers.CLIPTextModelWithProjection.from_pretrained(clip)
    tokens = transformers.AutoTokenizer.from_pretrained(clip)(["dog"], return_tensors="pt")
    with torch.no_grad():
        expected = network(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
        ).text_embeds[0]
    torch.testing.assert_close(found["embeddings"][2], expected, rtol=1e-4, atol=1e-6)
    assert (found["embeddings"][0] - found["embeddings"][2]).abs().max() > 1e-3


def test_the_file_is_what_coco_reads(
    clip: Path, captions: Path, tmp_path: Path, write_image
) -> None:
    write_image(tmp_path / "images/a.png", 8, 8, 0)
    embed_captions(captions, tmp_path / "text.safetensors", clip, device="cpu")
    _, cond = coco(tmp_path / "images", captions, tmp_path / "text.safetensors", size=4)[0]
    first = load_file(tmp_path / "text.safetensors")["embeddings"][0]
    torch.testing.assert_close(cond, first / first.norm())


def test_what_cannot_be_embedded_is_refused(clip: Path, captions: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(WherefromError, match="empty holds no CLIP that transformers can read"):
        embed_captions(captions, tmp_path / "text.safetensors", tmp_path / "empty")
    with pytest.raises(WherefromError, match="there is no file of captions"):
        embed_captions(tmp_path / "none.json", tmp_path / "text.safetensors", clip)
    captions.write_text(json.dumps({"images": [], "annotations": []}))
    with pytest.raises(WherefromError, match="has no captions"):
        embed_captions(captions, tmp_path / "text.safetensors", clip)
    with pytest.raises(WherefromError, match="batch_size must be at least 1"):
        embed_captions(captions, tmp_path / "text.safetensors", clip, batch_size=0)
    assert not (tmp_path / "text.safetensors").exists()
