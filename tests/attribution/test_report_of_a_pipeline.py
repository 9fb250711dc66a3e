"""Claims about a report of a diffusers pipeline: latents are shown as the pictures, prompts and
columns behind them.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import diffusers
import pytest

import wherefrom
from pipelines import saved_world


def test_latents_are_reported_as_pictures_with_their_captions_and_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = saved_world("saved", "pictures", "lora")[:2]
    (table,) = Path("pictures").glob("metadata.*")
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["artist"] = f"artist {number % 2}"
    table.write_text("\n".join(json.dumps(row) for row in rows))
    model = wherefrom.from_pipeline(diffusers.DiffusionPipeline.from_pretrained("saved"))
    train = model.dataset("pictures")
    queries = model.queries(made, ["a <cat>", "a dog"])
    hits = wherefrom.TID(model.denoiser, model.draws(2)).fit(train).attribute(queries, train, 4)
    hits.report("report.html", train, queries, model=model)
    page = Path("report.html").read_text()
    assert "By <bdi>artist</bdi>" in page
    assert "“a &lt;cat&gt;”" in page
    hits.to_csv("hits.csv", train)
    lines = Path("hits.csv").read_text(encoding="utf-8-sig").splitlines()
    first = next(csv.DictReader(lines))
    row = rows[int(first["index"])]
    assert (first["name"], first["caption"]) == (row["file_name"], row["text"])
    assert first["artist"] == row["artist"]
    hits.contact_sheet("sheet.png", train, queries)
