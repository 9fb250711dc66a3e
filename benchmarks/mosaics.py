"""Data sets that come as one large picture, a mosaic, and a JSON file, unpacked into the folders
that `wikiart-small` and `coco-small` read.

    python benchmarks/mosaics.py paintings.webp paintings.json --out data/wikiart
    wherefrom evaluate wikiart-small --out runs/wikiart-small --data data/wikiart

    python benchmarks/mosaics.py photographs.webp photographs.json --out data/coco
    wherefrom evaluate coco-small --out runs/coco-small --data data/coco

A mosaic has square tiles in rows of --columns. The JSON of paintings has `styles`, names, and
`labels`, a number for each tile; that of photographs is a list with `image_id` and `captions` for
each tile, of which the last --held-out give queries their captions and are not trained on.

Captions become the sum of one random vector for each word, weighted by how rare the word is: a
stand-in for the text encoder of CLIP that needs no weights. Where CLIP is at hand,
`wherefrom.data.embed_captions` makes the same files from the same annotations.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

DIM = 768  # as CLIP's, which the network of coco-small takes


def tiles(path: Path, count: int, side: int, columns: int) -> Iterator[NDArray[np.uint8]]:
    """The first `count` tiles of a mosaic, row by row, [side, side, 3] each."""
    Image.MAX_IMAGE_PIXELS = None  # a mosaic is larger than what Pillow takes for an attack
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    height, width = pixels.shape[0] // side, pixels.shape[1] // side
    if width != columns or height * width < count:
        raise SystemExit(
            f"{path} has {height} rows of {width} tiles of {side} pixels; {count} tiles in rows of "
            f"{columns} were expected"
        )
    for place in range(count):
        row, column = divmod(place, columns)
        yield pixels[row * side : (row + 1) * side, column * side : (column + 1) * side]


def paintings(found: Iterator[NDArray[np.uint8]], about: dict[str, Any], out: Path) -> None:
    """A folder for each style, with its paintings in the order of the mosaic."""
    for name in about["styles"]:
        (out / name).mkdir(parents=True, exist_ok=True)
    for place, (tile, label) in enumerate(zip(found, about["labels"], strict=True)):
        Image.fromarray(tile).save(out / about["styles"][label] / f"{place:06}.png")


def photographs(
    found: Iterator[NDArray[np.uint8]], about: list[dict[str, Any]], out: Path, held_out: int
) -> None:
    """COCO's own layout: train2017 and val2017, their annotations, and embeddings of these."""
    if not 0 < held_out < len(about):
        raise SystemExit(f"--held-out is from 1 to {len(about) - 1}, not {held_out}")
    texts = [caption for one in about for caption in one["captions"]]
    vectors = word_sums(texts)  # [A, DIM]
    numbers = iter(range(len(texts)))
    for name, some in (("train2017", about[:-held_out]), ("val2017", about[-held_out:])):
        for folder in (name, "annotations", "embeddings"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        images, notes = [], []
        for one in some:
            file = f"{one['image_id']:012}.png"
            Image.fromarray(next(found)).save(out / name / file)
            images.append({"id": one["image_id"], "file_name": file})
            for caption in one["captions"]:
                notes.append({"id": next(numbers), "image_id": one["image_id"], "caption": caption})
        content = json.dumps({"images": images, "annotations": notes})
        (out / "annotations" / f"captions_{name}.json").write_text(content)
        ids = torch.tensor([note["id"] for note in notes])
        kept = {"ids": ids, "embeddings": vectors[ids].contiguous()}
        save_file(kept, out / "embeddings" / f"captions_{name}.safetensors")


def word_sums(texts: Sequence[str]) -> Tensor:
    """For each text the sum of its words' random vectors, rare words weighing more: [A, DIM]."""
    words = [set(re.findall(r"[a-z0-9']+", text.lower())) for text in texts]
    common = Counter(word for some in words for word in some)
    vectors = {word: word_vector(word) for word in common}
    found = torch.zeros(len(texts), DIM)
    for place, some in enumerate(words):
        for word in sorted(some):
            # plus one: a text whose words all have it is not nothing
            found[place] += (1 + math.log(len(texts) / common[word])) * vectors[word]
    return found


def word_vector(word: str) -> Tensor:
    """A vector of length about one that is the same for a word wherever it is asked for."""
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:7], "big")
    return torch.randn(DIM, generator=torch.Generator().manual_seed(seed)) / DIM**0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mosaic", type=Path)
    parser.add_argument("about", type=Path, help="the JSON file")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--side", type=int, default=64, help="of a tile, in pixels")
    parser.add_argument("--columns", type=int, default=50, help="tiles in a row")
    parser.add_argument("--held-out", type=int, default=107, help="photographs for queries alone")
    arguments = parser.parse_args()
    about = json.loads(arguments.about.read_text())
    styled = isinstance(about, dict)
    count = len(about["labels"] if styled else about)
    found = tiles(arguments.mosaic, count, arguments.side, arguments.columns)
    if styled:
        paintings(found, about, arguments.out)
    else:
        photographs(found, about, arguments.out, arguments.held_out)
    print(f"{count} images in {arguments.out}")


if __name__ == "__main__":
    main()
