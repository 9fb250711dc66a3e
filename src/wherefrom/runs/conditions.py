"""What a run's model generates from, and whether an image's prompt or class fits it: told by
run.toml and by what lies in the folders that it names, before anything is opened or computed.
"""

from __future__ import annotations

from pathlib import Path

from ..artefacts.files import load_json
from ..errors import WherefromError
from .networks import below, pipeline_parts, takes_texts
from .settings import Settings
from .space import Asked, class_number, few

_EMBEDDINGS = ("num_class_embeds", "class_embed_type", "num_embeds_ada_norm")
PROMPT, CLASS, NOTHING = "a prompt", "a class", "nothing"


def generates_from(settings: Settings, place: Path) -> str | None:
    """A prompt, a class, or nothing; None: only the opened pipeline tells."""
    if settings.model.pipeline is None:
        return CLASS if settings.data.labels else NOTHING
    path = below(place, settings.model.pipeline)
    parts = pipeline_parts(path)
    if takes_texts(parts):
        return PROMPT
    return CLASS if "id2label" in parts or _takes_classes(path) else None


def _takes_classes(path: Path) -> bool:
    """Whether the network of a pipeline has an embedding of classes."""
    found = [path / name / "config.json" for name in ("unet", "transformer")]
    configs = [load_json(one) for one in found if one.is_file()]
    return any(isinstance(one, dict) and one.get(key) for one in configs for key in _EMBEDDINGS)


def check_condition(
    settings: Settings, place: Path, cond: Asked, classes: list[str] | None
) -> None:
    """Refuse a prompt or a class that cannot be, or one that is missing; `classes`: the names of
    those that the training images have.
    """
    what = generates_from(settings, place)
    if what == PROMPT and not isinstance(cond, str):
        raise WherefromError(
            "this model generates from a prompt: say which it is with --prompt (in Python: cond=)"
        )
    if what == CLASS and cond is None:
        listed = f" of {few(classes)}" if classes else ""
        raise WherefromError(
            f"this model was trained with classes: say which{listed} it is with --class (in "
            "Python: cond=)"
        )
    if what == NOTHING or (what == CLASS and classes):
        class_number(cond, classes if what == CLASS else None)
