"""Text embeddings of COCO's captions by CLIP, computed once: the conditions of text-conditional
models.

The file they are written to is the one that `coco` reads.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artefacts.files import save
from ..errors import WherefromError, whole
from ..running.progress import bar
from .coco import read_captions
from .pretrained import pretrained


@torch.no_grad()
def embed_captions(
    captions: str | os.PathLike[str],
    path: str | os.PathLike[str],
    model: str | os.PathLike[str] = "laion/CLIP-ViT-L-14-laion2B-s32B-b82K",
    batch_size: int = 256,
    device: str | torch.device | None = None,
) -> None:
    """Embed every caption of a COCO annotation file and write ids [A] and embeddings [A, D] to
    `path`.

    `model`: a CLIP on the Hugging Face hub, or a folder; the default is the one that the paper's
    model was trained with. `device`: None: a GPU where there is one.
    """
    whole("batch_size", batch_size, 1)
    _, annotations = read_captions(Path(captions))
    if not annotations:
        raise WherefromError(f"{captions} has no captions: give an annotation file with some")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    network, tokenize = pretrained(model, "CLIP", ("clip",), _tokenizer)
    network = network.to(place).eval()
    parts: list[Tensor] = []
    with bar(len(annotations), "embedding", "caption") as progress:
        for start in range(0, len(annotations), batch_size):
            texts = [
                annotation["caption"] for annotation in annotations[start : start + batch_size]
            ]
            tokens = tokenize(texts, padding=True, truncation=True, return_tensors="pt").to(place)
            pooled = network.text_model(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            ).pooler_output
            parts.append(network.text_projection(pooled).float().cpu())
            progress.update(len(texts))
    ids = torch.tensor([annotation["id"] for annotation in annotations])
    save(
        path,
        {"ids": ids, "embeddings": torch.cat(parts)},
        {"kind": "captions", "model": os.fspath(model)},
    )


def _tokenizer(transformers: Any, place: str) -> Any:
    return transformers.AutoTokenizer.from_pretrained(place)
