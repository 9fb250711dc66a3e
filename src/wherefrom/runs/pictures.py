"""A run's training images: what run.toml names, be it a folder, tars, Parquet files or a known data
set, and the captions that a pipeline takes with them.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..data.cifar import cifar10
from ..data.described import Described
from ..data.digits import digits
from ..data.folder import Folder, folder
from ..data.items import Dataset
from ..data.parquet import parquet
from ..data.shards import is_elsewhere
from ..data.sidecars import CAPTION_COLUMNS, captions_of, metadata_columns
from ..data.stamps import stamps
from ..data.tar_index import Unwritable
from ..data.tars import Tars, tars
from .broken import broken_images, first_decoded
from .networks import below
from .settings import DataTable, Settings
from .toml import NAME

_CIFAR10 = [
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
]
TABLES = (".csv", ".jsonl", ".parquet")
Shown = Folder | Described


def images_of(data: DataTable, place: Path, size: Any, channels: int) -> tuple[Dataset, list[str]]:
    """The training images and the names of their classes, if they have any."""
    if data.dataset == "digits":
        return digits(labels=data.labels), [str(number) for number in range(10)]
    if data.dataset == "stamps":
        drawn = stamps(labels=data.labels)
        return drawn, drawn.classes
    if data.dataset == "cifar10":
        assert data.path is not None
        return cifar10(below(place, data.path), labels=data.labels), _CIFAR10
    found = pictures_of(data, place, size, channels)
    return found, found.classes if isinstance(found, Folder) else []


def pictures_of(data: DataTable, place: Path, size: Any = None, channels: int = 3) -> Shown:
    """The training images that are files, or in files; without those that cannot be decoded where
    run.toml says so.
    """
    found = _all_pictures(data, place, size, channels)
    if not data.skip_broken:
        return found
    if not (place / NAME).is_file():  # before there is a run, one that can be decoded is enough
        rest: Shown = found.without(range(first_decoded(found)))
        return rest
    # whatever the size, it is the same list
    whole = found if (size, channels) == (None, 3) else _all_pictures(data, place, None, 3)
    broken = broken_images(whole, place)
    return found.without(broken) if broken else found


def _all_pictures(data: DataTable, place: Path, size: Any, channels: int) -> Shown:
    if data.tars is not None:
        return _in_tars(_files(data.tars, place), place, size, channels)
    if data.parquet is not None:
        return parquet(_files(data.parquet, place), size=size, channels=channels)
    assert data.images is not None
    return folder(below(place, data.images), size, channels, data.labels)


def _in_tars(named: str | Path, place: Path, size: Any, channels: int) -> Tars:
    """Tars, whose indexes lie beside them, or in the run's folder where other people's tars may not
    be written to; before there is a run, for as long as they are looked at.
    """
    try:
        return tars(named, size=size, channels=channels)
    except Unwritable:
        if (place / NAME).is_file():
            return tars(named, size=size, channels=channels, index=place / "tar-index")
    with TemporaryDirectory(ignore_cleanup_errors=True) as brief:
        return tars(named, size=size, channels=channels, index=brief)


def _files(named: str, place: Path) -> str | Path:
    """As a run.toml names them; an address stays one, and is refused as such."""
    return named if is_elsewhere(named) else below(place, named)


def named_images(settings: Settings, place: Path) -> tuple[Dataset, list[str] | None]:
    """The training images as run.toml names them, found without the network, and the names of their
    classes where they have any.
    """
    found, names = images_of(settings.data, place, None, 3)
    return found, names if settings.data.labels else None


# --- captions -------------------------------------------------------------------------------------


def columns_of(found: Shown) -> set[str]:
    """The columns that are known of pictures, or lie beside them."""
    if isinstance(found, Described):
        return set(found.column_names())
    return metadata_columns(found.root)


def given_captions(data: DataTable, place: Path, found: Shown) -> Any:
    """As `model.dataset` takes them."""
    if isinstance(found, Folder) and data.labels:
        return found.labels
    if data.captions is None:
        if isinstance(found, Described):
            return None
        # metadata may be of artists and licences alone, and the captions in text files
        return None if columns_of(found) & set(CAPTION_COLUMNS) else captions_of(list(found.paths))
    if Path(data.captions).suffix in TABLES:
        return str(below(place, data.captions).absolute())
    return data.captions


def texts_of(found: Shown, captions: Any) -> Any:
    """What captions say, where they are a column or a file."""
    table = isinstance(captions, str) and Path(captions).suffix in TABLES
    if captions is None or table or (isinstance(captions, str) and captions in columns_of(found)):
        return captions_of(found, captions)
    return captions
