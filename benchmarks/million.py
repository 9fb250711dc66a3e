"""A bank for millions: what the approximate index finds of the exact top 100 and of the top 1 %,
how fast, and in how much memory, as a bank grows to a million items.

    python benchmarks/million.py million-run --out docs/results/million.json

A real bank comes first: digits, 8 draws, a student of 256 numbers that is taught for two minutes.
Synthetic items are drawn from a normal distribution of its mean and covariance over all draws
together, so that each draw has the real spectrum and draws go together as they really do; then each
draw is made a unit vector. They have no clusters, which would make cells easier. Queries are drawn
likewise. The bank grows by appending; its index is made anew at each size, by one process and by
several. Times and memory are those of a process of their own, which first only searches
approximately; both searches take turns there. The folder is some gigabytes.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import wherefrom
from common import OUT, Report, machine, seconds
from wherefrom.artefacts.files import load, load_json, save, save_json
from wherefrom.search.approximate import Approximate
from wherefrom.search.store import VectorStore
from wherefrom.tide.bank import Bank

DRAWS, DIM, TOP = 8, 256, 100
RANK = 512  # directions of the real covariance that synthetic items have; the rest is noted
BATCH = 2048


class Nothing(torch.utils.data.Dataset):
    """Items from a number on whose vectors are drawn, not made."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return torch.zeros(1, 1, 1)

    def fingerprint(self) -> str:
        return f"synthetic {self.first} {self.count}"


class Synthetic:
    """Draws vectors, and is a bank's student as far as one is asked for vectors of queries."""

    def __init__(self, folder: Path) -> None:
        tensors, self.spectrum = load(folder / "spectrum.safetensors")
        self._mean, self._map = tensors["mean"], tensors["map"]  # [D], [rank, D]
        self.denoiser = wherefrom.Denoiser(torch.nn.Linear(1, 1), wherefrom.EDM())
        self.draws = wherefrom.Draws(wherefrom.EDM(), (1, 1, 1), DRAWS)
        self.dim, self.teacher, self.about = DIM, None, {"method": "synthetic"}

    def identity(self) -> dict[str, Any]:
        return {"student": "synthetic"}

    def check_unchanged(self) -> None:
        """There is no network that could change."""

    def embed(self, x: Tensor, cond: Any = None, draws: Sequence[int] | None = None) -> Tensor:
        raise NotImplementedError("there are no images")

    def vectors(self, streams: Any) -> Tensor:
        raise NotImplementedError("there is no network to listen to")

    def drawn(self, count: int, seed: int) -> Tensor:
        """[count, M, d]."""
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randn(count, len(self._map), generator=generator)
        rows = (codes @ self._map).add_(self._mean)
        return F.normalize(rows.view(count, DRAWS, DIM), dim=2)

    def made(self, first: int) -> Callable[[Tensor, Any, Sequence[int]], Tensor]:
        """As a store asks for vectors, of items from `first` on."""
        return lambda x, cond, places: self.drawn(len(x), 10 + first + places[0])


# --- the real bank and its spectrum ---------------------------------------------------------------


def real(folder: Path, steps: int, epochs: float) -> None:
    """Teach a student on digits, and keep the spectrum of its bank."""
    if (folder / "spectrum.safetensors").exists():
        return
    settings, data = wherefrom.preset("digits"), wherefrom.data.digits()
    network = settings.train(data, store=folder / "model", steps=steps)
    denoiser = wherefrom.Denoiser(network, wherefrom.EDM())
    draws = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), DRAWS)
    tid = wherefrom.TID(denoiser, draws).fit(data, samples=400, store=folder / "teacher")
    how: dict[str, Any] = {"batch_size": 64, "lr": 1e-3, "dim": DIM, "hidden": 128}
    how |= {"objective": "listwise", "embedder": "grid", "decay": 0.5}
    tide = wherefrom.TIDE.distill(tid, data, epochs, store=folder / "student", **how)
    bank = tide.index(data, folder / "digits")
    vectors = bank.vectors(bank.ids)
    rows = vectors.flatten(1)
    _, lengths, axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    shares = (lengths**2 / (lengths**2).sum()).double()
    cosines = torch.einsum("nmd,kmd->mnk", vectors[:500], vectors[:500])
    pairs = torch.triu_indices(500, 500, 1)
    about = {
        "images": len(bank),
        "training steps": steps,
        "epochs of distillation": epochs,
        "Spearman with TID": tide.history[-1].spearman,
        "components that hold 90, 99, 99.9 %": _holding(shares),
        "effective dimensions": float(1 / (shares**2).sum()),
        "share of variance left out": float(shares[RANK:].sum()),
        "of each draw": [_of_draw(vectors[:, m]) for m in range(DRAWS)],
        "correlation of cosines between draws": torch.corrcoef(
            cosines[:, pairs[0], pairs[1]]
        ).tolist(),
    }
    scaled = axes[:RANK] * lengths[:RANK, None] / (len(rows) - 1) ** 0.5
    save(folder / "spectrum.safetensors", {"mean": rows.mean(0), "map": scaled}, about)


def _of_draw(rows: Tensor) -> dict[str, Any]:
    values = torch.linalg.eigvalsh(torch.cov(rows.double().T)).flip(0).clamp(min=0)
    shares = values / values.sum()
    return {
        "length of the mean": float(rows.mean(0).norm()),
        "first shares": shares[:8].tolist(),
        "components that hold 90, 99, 99.9 %": _holding(shares),
        "effective dimensions": float(1 / (shares**2).sum()),
    }


def _holding(shares: Tensor) -> list[int]:
    return [int((shares.cumsum(0) < part).sum()) + 1 for part in (0.9, 0.99, 0.999)]


# --- growing --------------------------------------------------------------------------------------


def grown(student: Synthetic, folder: Path, count: int, dtype: Any) -> Bank:
    """The bank of so many items, from where it was left."""
    place = folder / f"bank-{dtype}"
    if not place.exists():
        store = VectorStore.build(
            "bank",
            Nothing(0, count),
            student.made(0),
            DIM,
            student.identity(),
            place,
            draws=DRAWS,
            dtype=dtype,
            batch_size=BATCH,
        )
    store = VectorStore.open(place, "bank", "run this again")
    if store.given > count:
        raise SystemExit(f"{place} has {store.given} items already: choose another folder")
    if store.given < count:
        more = Nothing(store.given, count - store.given)
        store.append(more, student.made(store.given), "appending")
    return Bank(student, store)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def built(bank: Bank, folder: Path, builders: int) -> dict[str, Any]:
    """Make the index of a bank by one process and by several, one thread each, and say what that
    took.
    """
    count, found = len(bank), dict[str, Any]()
    for number in (1, builders) if builders > 1 else (1,):
        place = folder / f"index-{count}" if number == 1 else folder / "by several"
        shutil.rmtree(place, ignore_errors=True)
        notes = [folder / f"built-{one}.json" for one in range(number)]
        running = [asked(folder, bank, build=place, notes=note) for note in notes]
        if any(process.wait() for process in running):
            raise SystemExit("a process that makes the index has failed, see above")
        each = [load_json(note) for note in notes]
        found[f"made by {number}"] = {"s": max(one["s"] for one in each), "each": each}
    if builders > 1:
        found["several write the same bits"] = contents(place) == contents(
            folder / f"index-{count}"
        )
        shutil.rmtree(place)
    found["bytes of an item in the index"] = size_of(folder / f"index-{count}") / count
    found["bytes of an item in the bank"] = bank.store.item_bytes
    return found


def asked(folder: Path, bank: Bank, **what: Any) -> subprocess.Popen[bytes]:
    """A process of this file that does something with the bank as it is."""
    given = [word for name, value in what.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, __file__, str(folder), "--dtype", bank.store.dtype, *given]
    return subprocess.Popen(command)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


def build(folder: Path, place: Path, dtype: str) -> dict[str, Any]:
    """What one of the processes does that make an index; each measures recall, which is a scan."""
    torch.set_num_threads(1)
    bank = opened(folder, dtype)
    before = resident()
    started, own = time.perf_counter(), time.process_time()
    near = bank.approximate(folder=place)
    figures = {"s": time.perf_counter() - started, "CPU s": time.process_time() - own}
    after = resident()
    figures |= {"memory grew by, GiB, at most": after["peak"] - before["now"], "now": after}
    figures["s of which to measure recall, about"] = seconds(near.measured)
    return {**figures, "sizes": near._made.state["sizes"], "recalls": near.recalls}


def opened(folder: Path, dtype: str) -> Bank:
    store = VectorStore.open(folder / f"bank-{dtype}", "bank", "run this again")
    return Bank(Synthetic(folder), store)


# --- measuring, in a process of its own -----------------------------------------------------------


def resident() -> dict[str, float]:
    """The most memory that this process has had, and what it has now, in GiB."""
    wanted = {"VmHWM": "peak", "VmRSS": "now", "RssFile": "mapped files", "RssAnon": "own"}
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines if ":" in line)
    return {wanted[name]: int(value.split()[0]) / 2**20 for name, value in pairs if name in wanted}


def measure(folder: Path, count: int, number: int, dtype: str, rounds: int = 3) -> dict[str, Any]:
    """Both searches, one query at a time, in turn."""
    student = Synthetic(folder)
    queries = student.drawn(number, seed=1)
    torch.set_num_threads(1)
    before = resident()
    started = time.perf_counter()
    bank = opened(folder, dtype)
    assert len(bank) == count
    near = Approximate.open(folder / f"index-{count}", bank)
    taken = time.perf_counter() - started
    load_before = os.getloadavg()
    _, first = clocked(near, queries)
    after = resident()
    figures: dict[str, Any] = {
        "opened in, s": taken,
        "memory before, GiB": before,
        "memory after approximate searches alone, GiB": after,
        "memory grew by, GiB, at most": after["peak"] - before["now"],
        "queries": number,
        "ms of a query, the first time": first,
    }
    for threads in (1, 2):
        torch.set_num_threads(threads)
        fast, slow, ratios = [], [], []
        for _ in range(rounds):
            quick, spread = clocked(near, queries)
            fast.append(spread)
            whole, spread = clocked(bank, queries[:5])
            slow.append(spread)
            ratios.append([b / a for a, b in zip(quick, whole, strict=True)])
        figures[f"{threads} threads"] = {
            "approximate, by round": fast,
            "exact, by round": slow,
            "times as fast in wall clock and CPU time, by round": ratios,
            "load average": list(os.getloadavg()),
        }
    torch.set_num_threads(1)
    exact, found = bank.nearest(queries, TOP), near.nearest(queries, TOP)
    figures["recall of the exact top 100"] = shared(found, exact)
    figures["recall of the 100 least"] = shared(found, exact, least=True)
    figures["least recall of a query"] = min(each(found.indices, exact.indices))
    percent = math.ceil(count / 100)
    # scores of candidates are exact: the share that is proposed is the share that is found
    shares = each(near._candidates(queries, percent), bank.nearest(queries, percent).indices)
    wide = {"items": percent, "mean": float(np.mean(shares)), "least of a query": min(shares)}
    figures["recall of the exact top 1 %"] = wide | clocked(near, queries[:5], percent)[1]
    figures["memory at the end, exact searches among it, GiB"] = resident()
    by_probes, usual = {}, near.probes
    lists = near._made.state["sizes"]["lists"]
    for probes in (usual // 4, usual // 2, usual, min(lists, 2 * usual)):
        near.probes = probes
        recall = shared(near.nearest(queries, TOP), exact)
        by_probes[probes] = {"recall": recall, **clocked(near, queries)[1]}
    figures["by probes"] = by_probes
    figures["load average before and after"] = [list(load_before), list(os.getloadavg())]
    return figures


def clocked(
    searched: Approximate | Bank, queries: Tensor, top: int = TOP
) -> tuple[list[float], dict[str, Any]]:
    """Milliseconds of queries one after the other by the clock and of CPU time, medians and
    spread; CPU time is what a machine that is busy with others does not change much.
    """
    wall, own = [], []
    for query in queries:
        started = time.process_time()
        wall.append(1e3 * seconds(lambda one=query[None]: searched.nearest(one, top)))
        own.append(1e3 * (time.process_time() - started))
    medians = [float(np.median(wall)), float(np.median(own))]
    return medians, {"ms": _spread(wall), "CPU ms": _spread(own)}


def summary(found: dict[str, Any]) -> str:
    """What matters most of what was found at one size."""
    kinds = (found["1 threads"][f"{which}, by round"] for which in ("approximate", "exact"))
    fast, slow = ([round(spread["ms"]["median"], 1) for spread in rounds] for rounds in kinds)
    return (
        f"{found['recall of the exact top 100']:.3f} of the top 100, "
        f"{found['recall of the exact top 1 %']['mean']:.3f} of the top 1 %, {fast} ms, exact "
        f"{slow} ms, memory grew by {found['memory grew by, GiB, at most']:.2f} GiB, made in "
        f"{found['made by 1']['s']:.0f} s"
    )


def each(found: Tensor, exact: Tensor) -> list[float]:
    return [
        float(torch.isin(one, other).float().mean())
        for one, other in zip(exact, found, strict=True)
    ]


def shared(found: Any, exact: Any, least: bool = False) -> float:
    name = "least_indices" if least else "indices"
    return float(np.mean(each(getattr(found, name), getattr(exact, name))))


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high, worst = np.percentile(values, [25, 50, 75, 100]).tolist()
    return {"median": middle, "quartile 1": low, "quartile 3": high, "most": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where all is kept: 4 GiB for a million items")
    parser.add_argument("--items", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--dtype", default="int8", help="of the bank")
    parser.add_argument("--train-steps", type=int, default=1500)
    parser.add_argument("--epochs", type=float, default=14, help="of the distillation")
    parser.add_argument("--builders", type=int, default=2, help="processes that make an index")
    for name, kind in (("--measure", int), ("--build", Path), ("--notes", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=OUT)
    arguments = parser.parse_args()
    folder = arguments.folder
    if arguments.measure:
        measured = measure(folder, arguments.measure, arguments.queries, arguments.dtype)
        save_json(arguments.notes, measured)
        return
    if arguments.build:
        save_json(arguments.notes, build(folder, arguments.build, arguments.dtype))
        return
    real(folder, arguments.train_steps, arguments.epochs)
    student = Synthetic(folder)
    report = Report(arguments.out, machine=machine(), cores=os.cpu_count(), top=TOP)
    report.keep(torch=torch.__version__, dtype=arguments.dtype, draws=DRAWS, dim=DIM)
    report.keep(spectrum=student.spectrum, faiss=__import__("faiss").__version__)
    sizes, started = {}, os.getloadavg()
    for count in sorted(arguments.items):
        taken = time.perf_counter()
        bank = grown(student, folder, count, arguments.dtype)
        grew = time.perf_counter() - taken
        found = {"items": count, "bank grew in, s": grew} | built(bank, folder, arguments.builders)
        notes = folder / "measured.json"
        if asked(folder, bank, measure=count, queries=arguments.queries, notes=notes).wait():
            raise SystemExit("the process that measures has failed, see above")
        sizes[str(count)] = found | load_json(notes)
        report.keep(sizes=sizes, loads=[list(started), list(os.getloadavg())])
        print(f"{count:,} items: {summary(sizes[str(count)])}", flush=True)
    first = min(arguments.items)
    if len(arguments.items) > 1:  # the first index follows the bank to its last size
        near = Approximate.open(folder / f"index-{first}", bank)
        taken = seconds(near.follow)
        queries = student.drawn(arguments.queries, seed=1)
        exact, found = bank.nearest(queries, TOP), near.nearest(queries, TOP)
        figures = {"from": first, "to": len(bank), "followed in, s": taken}
        report.note(follows={**figures, "recall of the exact top 100": shared(found, exact)})


if __name__ == "__main__":
    main()
