"""How fast images of a tar are read: one after the other as before there were threads, and ahead by
1, 2 and 4 of them; alone, beside a device that works on each batch for as long as reading it takes,
and from a disk that takes 20 ms to find an image, as one behind a network does.

    python benchmarks/reading.py
    python benchmarks/reading.py --images 400 --side 512 --out figures.json

Every figure is the median of `--repeats` passes, taken in turns, as a ratio to reading without
threads in the same run. The images are JPEGs of noise that was smoothed, which compress as
photographs do.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from common import OUT, Report, machine
from wherefrom.data import tars
from wherefrom.data.images import Item
from wherefrom.data.items import Dataset, ahead, item_shape, read
from wherefrom.data.tars import Tars

WORKERS = (1, 2, 4)


def packed(path: Path, images: int, side: int) -> Path:
    """A tar of JPEGs."""
    generator = np.random.default_rng(0)
    with tarfile.open(path, "w") as tar:
        for number in range(images):
            coarse = generator.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
            content = io.BytesIO()
            Image.fromarray(coarse).resize((side, side)).save(content, "JPEG", quality=90)
            info = tarfile.TarInfo(f"{number:06d}.jpg")
            info.size = len(content.getvalue())
            tar.addfile(info, io.BytesIO(content.getvalue()))
    return path


class Distant:
    """The same images, each of which has to be waited for."""

    thread_safe = True

    def __init__(self, dataset: Tars) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Item:
        time.sleep(0.02)
        return self.dataset[index]


@contextmanager
def plainly(
    dataset: Dataset, places: list[range], shape: tuple[int, ...]
) -> Iterator[Iterator[object]]:
    """Batches as they are read without threads."""
    yield (read(dataset, some, shape) for some in places)


def seconds(begin: Callable[[], object], each: float) -> float:
    """Of a pass in which a device works so long on every batch; it leaves the CPU alone."""
    began = time.perf_counter()
    with begin() as batches:  # type: ignore[attr-defined]
        for _ in batches:
            time.sleep(each)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--side", type=int, default=512, help="pixels of an image")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help=OUT)
    asked = parser.parse_args()
    report = Report(asked.out, images=asked.images, side=asked.side, machine=machine())
    with tempfile.TemporaryDirectory() as folder:
        dataset = tars(packed(Path(folder) / "a.tar", asked.images, asked.side))
        shape, count = item_shape(dataset), len(dataset)
        places = [
            range(start, min(start + asked.batch, count)) for start in range(0, count, asked.batch)
        ]
        each = seconds(lambda: plainly(dataset, places, shape), 0) / len(places)
        scenes: tuple[tuple[str, Dataset, float], ...] = (
            ("alone", dataset, 0.0),
            ("beside a device", dataset, each),
            ("from afar", Distant(dataset), 0.0),
        )
        for words, source, working in scenes:
            ways: dict[str, Callable[[], object]] = {
                "no threads": partial(plainly, source, places, shape)
            }
            for workers in WORKERS:
                ways[f"{workers} ahead"] = partial(ahead, source, places, shape, workers=workers)
            took: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(asked.repeats):
                for name, begin in ways.items():
                    took[name].append(seconds(begin, working))
            middle = {name: statistics.median(times) for name, times in took.items()}
            for name, time_ in middle.items():
                figures = {"items/s": count / time_, "times as fast": middle["no threads"] / time_}
                report.note(**{f"{words}, {name}": figures})


if __name__ == "__main__":
    main()
