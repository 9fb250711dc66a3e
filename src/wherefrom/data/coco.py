"""MS-COCO: photographs with several captions each, given to the model as text embeddings computed
beforehand.

The fixed view takes an image's first caption, the training view a random one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import normalize

from ..errors import WherefromError
from .decode import Size
from .lazy import ImageFiles, stamp


class Coco(ImageFiles):
    """Captioned images; `captions` lists the captions of each."""

    def __init__(
        self,
        root: Path,
        paths: Sequence[Path],
        captions: list[list[str]],
        rows: list[list[int]],
        embeddings: Embeddings,
        size: Size,
    ) -> None:
        super().__init__(root, paths, size)
        self.captions = captions
        self._rows = rows
        self._embeddings = embeddings

    def conditions(self) -> Any:
        return repr(self._rows), stamp(self._embeddings.path)

    def condition(self, index: int, choice: float) -> Tensor:
        rows = self._rows[index]
        return normalize(self._embeddings[rows[int(choice * len(rows))]], dim=0)


class Embeddings:
    """The embeddings of a safetensors file, read row by row; `row_of` finds the row of an
    annotation.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise WherefromError(f"there is no file of text embeddings {self.path}")
        try:
            with safe_open(self.path, framework="pt") as file:
                ids = file.get_tensor("ids")  # [A]
                shape = file.get_slice("embeddings").get_shape()
        except SafetensorError as error:
            raise WherefromError(
                f"{self.path} cannot be read ({error}): it must be a safetensors file with the "
                "tensors ids [A] and"
                " embeddings [A, D]"
            ) from error
        if ids.ndim != 1 or len(shape) != 2 or len(ids) != shape[0]:
            raise WherefromError(
                f"{self.path} has ids {list(ids.shape)} and embeddings {shape}; give [A] and [A, D]"
            )
        self.row_of = {annotation: row for row, annotation in enumerate(ids.tolist())}
        self._matrix: Any = None

    def __getitem__(self, row: int) -> Tensor:
        if self._matrix is None:
            file: Any = safe_open(self.path, framework="pt")
            self._matrix = file.get_slice("embeddings")
        embedding: Tensor = self._matrix[row : row + 1]
        return embedding[0].to(torch.float32)  # [D]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_matrix": None}


def coco(
    images: str | os.PathLike[str],
    captions: str | os.PathLike[str],
    embeddings: str | os.PathLike[str],
    size: Size = 64,
) -> Coco:
    """Images of a folder with the captions of a COCO annotation file, resized so that
    they just cover `size`, a square or (height, width).

    `embeddings` is a safetensors file with ids [A], the ids of annotations, and embeddings [A, D],
    those of their captions, which are brought to unit length; `embed_captions` makes one.
    """
    root, vectors = Path(images), Embeddings(embeddings)
    if not root.is_dir():
        raise WherefromError(f"there is no folder {root}")
    listed, annotations = read_captions(Path(captions))
    texts: dict[Any, list[str]] = {image["id"]: [] for image in listed}
    rows: dict[Any, list[int]] = {image["id"]: [] for image in listed}
    for annotation in annotations:
        image, number = annotation["image_id"], annotation["id"]
        if image not in texts:
            raise WherefromError(
                f"annotation {number} of {captions} is of image {image}, which the file does "
                "not list"
            )
        if number not in vectors.row_of:
            raise WherefromError(
                f"annotation {number} has no embedding in {embeddings}: embed every caption"
            )
        texts[image].append(annotation["caption"])
        rows[image].append(vectors.row_of[number])
    for image in listed:
        if not texts[image["id"]]:
            raise WherefromError(
                f"the image {image['file_name']} has no caption in {captions}: add one or drop "
                "the image"
            )
    paths = [root / image["file_name"] for image in listed]
    return Coco(root, paths, list(texts.values()), list(rows.values()), vectors, size)


def read_captions(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The images and the annotations of a COCO caption file."""
    if not path.is_file():
        raise WherefromError(f"there is no file of captions {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        listed = [{key: image[key] for key in ("id", "file_name")} for image in content["images"]]
        annotations = [
            {key: note[key] for key in ("id", "image_id", "caption")}
            for note in content["annotations"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise WherefromError(
            f"{path} is not a COCO caption file ({type(error).__name__}: {error}): it needs "
            "images with id and"
            " file_name, and annotations with id, image_id and caption"
        ) from error
    if len({image["id"] for image in listed}) != len(listed):
        raise WherefromError(f"{path} lists an image id twice: every image needs its own")
    return listed, annotations
