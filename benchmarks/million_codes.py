"""Which codes an index of a bank for millions should have: several kinds in the same cells, on the
items of million.py, whose folder it shares.

    python benchmarks/million_codes.py million-run --items 30000 --out codes.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from common import OUT, Report, machine, seconds
from million import TOP, Synthetic, each, grown, real
from wherefrom.search.quantiser import Quantiser, Sizes
from wherefrom.tide.bank import Bank


def codes(bank: Bank, student: Synthetic, queries: int) -> dict[str, Any]:
    """Codes of several kinds in the same cells, each asked for 100 and for 400 candidates."""
    faiss.omp_set_num_threads(torch.get_num_threads())
    store, vectors = bank.store, student.drawn(queries, seed=1)
    sizes = Sizes.fitting(store, None, None, None, None)
    quantiser = Quantiser.trained(store, sizes, torch.device("cpu"))
    exact, wide = bank.nearest(vectors, TOP).indices, sizes.components
    parts = [quantiser.queries(shard.decode()) for _, shard in store.shards()]
    points, rows = np.concatenate(parts), quantiser.queries(vectors)
    points -= points.mean(0)
    cells = quantiser.tensors()["cells"].numpy()
    rotation = faiss.RandomRotationMatrix(wide, wide)
    rotation.init(0)
    metric, scalar = faiss.METRIC_INNER_PRODUCT, faiss.ScalarQuantizer
    kind, lists = faiss.IndexIVFScalarQuantizer, sizes.lists
    wanted: dict[str, Callable[[Any], Any]] = {
        "scalar, 8 bits": lambda order: kind(order, wide, lists, scalar.QT_8bit, metric),
        "scalar, 4 bits": lambda order: kind(order, wide, lists, scalar.QT_4bit, metric),
        "product, 8 bits for 4 components": lambda order: faiss.IndexIVFPQ(
            order, wide, lists, wide // 4, 8, metric
        ),
    }
    for bits in (1, 2, 4, 8):
        wanted[f"RaBitQ, rotated, {bits} bits"] = lambda order, bits=bits: faiss.IndexIVFRaBitQ(
            order, wide, lists, metric, True, bits
        )
    found: dict[str, Any] = {}
    for name, make in wanted.items():
        turn = rotation.apply if "rotated" in name else np.ascontiguousarray
        order = faiss.IndexFlatIP(wide)
        order.add(turn(cells))
        index = make(order)
        placed = faiss.IndexFlatL2(wide)
        placed.add(turn(cells))
        cell = placed.search(turn(points), 1)[1][:, 0]
        trained = seconds(lambda index=index, turn=turn: index.train(turn(points[:50_000])))
        added = seconds(
            lambda index=index, turn=turn, cell=cell: index.add_core(
                len(points), faiss.swig_ptr(turn(points)), None, faiss.swig_ptr(cell)
            )
        )
        index.nprobe = sizes.probes
        asked = turn(rows)
        few = torch.from_numpy(index.search(asked, TOP)[1])
        many = torch.from_numpy(index.search(asked, 4 * TOP)[1])
        started = time.process_time()
        for one in asked:
            index.search(one[None], 4 * TOP)
        taken = 1e3 * (time.process_time() - started) / len(asked)
        found[name] = {
            "bytes": index.code_size,
            "trained in, s": trained,
            "encoded in, s": added,
            "exact top 100 among 100": float(np.mean(each(few, exact))),
            "exact top 100 among 400": float(np.mean(each(many, exact))),
            "CPU ms of a query": taken,
        }
    return {"items": len(bank), "sizes": sizes.state(), "codes": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where all is kept")
    parser.add_argument("--items", type=int, default=30_000)
    parser.add_argument("--queries", type=int, default=30)
    parser.add_argument("--out", type=Path, help=OUT)
    arguments = parser.parse_args()
    real(arguments.folder, steps=1500, epochs=14)
    student = Synthetic(arguments.folder)
    bank = grown(student, arguments.folder, arguments.items, "int8")
    report = Report(arguments.out, machine=machine(), faiss=faiss.__version__)
    report.note(codes=codes(bank, student, arguments.queries))


if __name__ == "__main__":
    main()
