"""Networks of transformers, from the Hugging Face hub or a local folder, and sentences for all that
can go wrong with that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from ..errors import WherefromError, need

T = TypeVar("T")


def pretrained(
    model: str | os.PathLike[str], what: str, kinds: tuple[str, ...], also: Callable[[Any, str], T]
) -> tuple[Any, T]:
    """A network in float32, and what `also(transformers, place)` reads beside it.

    Args:
        model: a name on the hub, or a folder.
        what: what the network is, for people.
        kinds: the model types of transformers that are that.
        also: reads a tokenizer or the like.
    """
    transformers: Any = need("transformers", "encoders")
    place = os.fspath(model)
    try:
        kind = transformers.AutoConfig.from_pretrained(place).model_type
        if kind not in kinds:
            raise WherefromError(
                f"{place!r} is a model of the type {kind!r}, not {what}: give another name or "
                "folder"
            )
        network, loaded = transformers.AutoModel.from_pretrained(place, output_loading_info=True)
        beside = also(transformers, place)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        if Path(place).is_dir():
            raise WherefromError(
                f"{place} holds no {what} that transformers can read ({reason}): download it "
                "there again"
            ) from error
        raise WherefromError(
            f"{place!r} is no local folder, and the Hugging Face hub did not give it "
            f"({reason}): give the folder of a copy that "
            "was downloaded elsewhere, or get online, or set HF_HOME to a cache that holds it"
        ) from error
    if loaded["missing_keys"]:
        raise WherefromError(
            f"{place} lacks weights of {what}, {min(loaded['missing_keys'])!r} among them: "
            "download it again"
        )
    return network.float(), beside
