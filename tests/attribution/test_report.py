"""Claims about what an attribution is written as: the page is parsed, the tables are read back, and
captions are as hostile as they come.
"""

from __future__ import annotations

import base64
import csv
import io
import itertools
import json
import math
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.attribution.apart import standing_apart
from wherefrom.attribution.groups import chosen_columns, totals
from wherefrom.attribution.markup import tag, text
from wherefrom.attribution.pictures import Pictures
from wherefrom.attribution.source import of_dataset, of_sets
from wherefrom.attribution.style import STYLE
from wherefrom.attribution.thumbs import encoded
from wherefrom.attribution.top import TopK, both_ends
from wherefrom.errors import WherefromError

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style><script>alert(1)</script>",
    "]]></svg><svg onload=alert(1)>",
    "javascript:alert(1)",
    "&lt;b&gt; &amp; &#60;i&#62;",
    "\x00\x1b[31m\u202eeno\udcff two\nlines",
    "=HYPERLINK(1)",
    "",
]
VOID = {"img", "meta", "rect", "line"}


class Parsed(HTMLParser):
    """A page as a list of elements, each with its attributes, the text in it and what it is in."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[dict] = []
        self._open: list[dict] = []
        self.feed(page)
        self.close()
        assert not self._open, "an element was never closed"

    def handle_starttag(self, tag, attributes):
        inside = [one["tag"] for one in self._open]
        element = {"tag": tag, "at": dict(attributes), "text": "", "inside": inside}
        assert len(element["at"]) == len(attributes), "an attribute is there twice"
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        assert tag in VOID

    def handle_endtag(self, tag):
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def all(self, tag, **attributes):
        return [
            one
            for one in self.elements
            if one["tag"] == tag
            and all(
                value in (one["at"].get(key) or "").split() for key, value in attributes.items()
            )
        ]


def parsed(path) -> Parsed:
    return Parsed(path.read_text(encoding="utf-8"))


def found(count=60, queries=2, top_k=8, halves=True):
    """An attribution of random scores in which item 7 stands apart for the first query alone."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(queries, count, generator=generator) ** 2
    scores[0, 7] = 60.0
    top = TopK(top_k, count)
    noisy = scores + 0.5 * torch.randn(2, queries, count, generator=generator)
    top.add(torch.arange(count), scores, noisy if halves else None)
    return top.result({"method": "TID", "draws": 4, "teacher": {"damping": 0.1}})


def coloured(count=60, side=8):
    pixels = np.random.default_rng(0).integers(0, 255, (count, 3, side, side), dtype=np.uint8)
    return wherefrom.data.Images(pixels, torch.arange(count) % 3)


@pytest.fixture
def page(tmp_path):
    hits, dataset = found(), coloured()
    hits.report(tmp_path / "report.html", dataset, Subset(dataset, [3, 4]))
    return parsed(tmp_path / "report.html")


def rows_of(path) -> list[dict[str, str]]:
    """The rows of a CSV file, by the names of their columns."""
    text = path.read_bytes().decode("utf-8-sig")
    return list(csv.DictReader(io.StringIO(text, newline="")))


# --- the page -------------------------------------------------------------------------------------


def test_a_report_is_one_file_that_asks_for_nothing_and_runs_nothing(page):
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {
        one["tag"] for one in page.elements
    }
    for element in page.elements:
        assert not [name for name in element["at"] if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            value = element["at"].get(name, "#")
            assert value.startswith(("#", "data:image/png;base64,", "data:image/jpeg;base64,"))
    style = page.all("style")[0]["text"]
    assert "url(" not in style
    assert "@import" not in style
    policy = [one["at"]["content"] for one in page.all("meta") if "http-equiv" in one["at"]]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_every_query_stands_beside_its_most_and_least_influential_images(page, tmp_path):
    hits = found()
    cards = page.all("article")
    assert [card["at"]["id"] for card in cards] == ["image-1", "image-2"]
    alts = [one["at"]["alt"] for one in page.all("img") if "article" in one["inside"]]
    wanted = []
    for query in range(2):
        wanted.append(f"Generated image {query + 1}")
        indices = [*hits.indices[query].tolist(), *hits.least_indices[query].tolist()]
        wanted += [f"Training image {index}: {index % 3}" for index in indices]
    assert alts == wanted
    for query, card in enumerate(cards):
        for score, above in zip(hits.scores[query], hits.standardised[query], strict=True):
            assert f"score {float(score):.3g}" in card["text"]
            assert f"+{float(above):.1f} sd" in card["text"]
        share = round(float(hits.stability[query]) * 8)
        assert f"{share} of the top 8 are the same in both halves" in card["text"]
        assert ("more draws may change" in card["text"]) == (share < 4)
    assert "percentile 100" in cards[0]["text"]


def test_the_pictures_are_those_of_the_data_set(page):
    dataset = coloured()
    shown = [one for one in page.all("img") if one["at"]["alt"].startswith("Training image 7:")]
    assert shown
    for one in shown:
        content = base64.b64decode(one["at"]["src"].partition(",")[2])
        pixels = np.array(Image.open(io.BytesIO(content))).transpose(2, 0, 1)
        assert np.array_equal(pixels, dataset.pixels[7])  # small ones dot for dot


def test_what_stands_apart_is_told_from_what_trails_off(page):
    badges = [one["text"] for one in page.all("p", **{"class": "badge"})]
    assert badges == ["the first hit stands apart", "no step among these hits"]
    assert len(page.all("li", **{"class": "found"})) == 1


def test_the_histogram_counts_every_training_image_and_marks_every_hit(tmp_path):
    hits, dataset = found(count=400), coloured(400)
    hits.report(tmp_path / "report.html", dataset)
    page = parsed(tmp_path / "report.html")
    drawings = page.all("svg", role="img")
    assert len(drawings) == 2
    assert "400 training images" in drawings[0]["at"]["aria-label"]
    marks = page.all("line", **{"class": "hit"})
    assert len(marks) == 16
    places = [float(one["at"]["x1"]) for one in marks[:8]]
    assert places == sorted(places, reverse=True)
    assert places[0] - places[1] > 500  # of 1,000: far above the rest
    bars = [one for one in page.all("rect") if "article" in one["inside"]]
    assert len(bars) == int((hits.histogram > 0).sum())


def test_headings_go_down_one_step_at_a_time_and_landmarks_have_names(page):
    levels = [int(one["tag"][1]) for one in page.elements if re.fullmatch(r"h[1-6]", one["tag"])]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(new <= old + 1 for old, new in itertools.pairwise(levels))
    ids = [one["at"]["id"] for one in page.elements if "id" in one["at"]]
    assert len(ids) == len(set(ids))
    for one in page.elements:
        if "aria-labelledby" in one["at"]:
            assert one["at"]["aria-labelledby"] in ids
    assert all(one["at"]["href"][1:] in ids for one in page.all("a"))
    assert len(page.all("main")) == len(page.all("header")) == len(page.all("footer")) == 1
    assert page.all("html")[0]["at"]["lang"] == "en"
    assert all(one["at"].get("alt") for one in page.all("img"))
    assert all(one["at"].get("scope") in ("row", "col") for one in page.all("th"))


def test_settings_and_fingerprints_are_told(tmp_path):
    denoiser = wherefrom.Denoiser(small_dit(), wherefrom.EDM())
    dataset = coloured()
    hits = found()
    hits.about.update(of_dataset(dataset))
    hits.report(tmp_path / "report.html", dataset, model=denoiser)
    page = parsed(tmp_path / "report.html")
    names = [one["text"] for one in page.all("th", scope="row")]
    rows = dict(zip(names[-6:], [one["text"] for one in page.all("td")][-6:], strict=True))
    assert rows["method"] == "TID"
    assert rows["teacher: damping"] == "0.1"
    assert rows["training images"] == "60"
    assert rows["fingerprint of the data set"] == wherefrom.data.fingerprint.data_fingerprint(
        dataset
    )
    assert re.fullmatch("[0-9a-f]{16}", rows["fingerprint of the model"])
    with pytest.raises(WherefromError, match="model is str"):
        found().report(tmp_path / "report.html", dataset, model="a model")


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_of_a_caption_a_name_or_a_column_is_ever_markup(tmp_path, hostile):
    root = tmp_path / "pictures"
    root.mkdir()
    rows = []
    for number in range(12):
        Image.new("RGB", (8, 8)).save(root / f"{number:02}.png")
        caption = hostile.replace("\x00", "").replace("\udcff", "") or "x"
        rows.append({"file_name": f"{number:02}.png", "text": caption, hostile: hostile})
    (root / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    dataset = wherefrom.data.folder(root)
    column = [hostile] * 6 + ["other"] * 6
    prompts = Pictures([Image.new("RGB", (8, 8))] * 2)
    prompts._texts = [hostile, hostile]
    hits = both_ends(torch.rand(2, 12), 3, about={"method": hostile, hostile: hostile})
    hits.report(
        tmp_path / "hostile.html", dataset, prompts, {hostile: column, "x": column}, title=hostile
    )
    hits.report(tmp_path / "plain.html", dataset, Pictures([Image.new("RGB", (8, 8))] * 2))
    bad, plain = (parsed(tmp_path / name) for name in ("hostile.html", "plain.html"))
    known = {(one["tag"], name) for one in plain.elements for name in one["at"]}
    extra = {"table", "thead", "tbody", "tr", "th", "td", "svg", "rect", "line", "bdi", "p", "div"}
    for element in bad.elements:
        for name in element["at"]:
            assert (element["tag"], name) in known or element["tag"] in extra, element
            assert not name.startswith("on")
        assert element["tag"] in extra | {one["tag"] for one in plain.elements}
    raw = (tmp_path / "hostile.html").read_bytes()
    assert not re.search(rb"[\x00-\x08\x0b-\x1f]", raw)
    assert "\u202e".encode() not in raw
    if hostile.strip():
        assert bad.all("h1")[0]["text"].split()[-1][-4:] == text_of(hostile)[-4:]


def text_of(hostile):
    """What a reader sees of it."""
    hidden = re.sub("[\x00\x1b\u202e\udcff]", "\ufffd", hostile)
    return " ".join(hidden.split())


def test_elements_are_only_made_here():
    assert tag("p", "<b>", tag("b", "&"), title='"><i>') == (
        '<p title="&quot;&gt;&lt;i&gt;">&lt;b&gt;<b>&amp;</b></p>'
    )
    assert len(text("x" * 10**6)) == 400


def test_the_pages_own_paragraphs_are_whole_and_only_peoples_texts_are_cut(tmp_path):
    title, dataset, names = "<b>" + "x" * 1000, coloured(), ["y" * 1000, "z", "", ""]
    found(queries=4).report(tmp_path / "r.html", dataset, title=title, names=names)
    page = parsed(tmp_path / "r.html")
    paragraphs = [one["text"] for one in page.all("p") if "section" in one["inside"]]
    assert all(one[-1] in ".:" for one in paragraphs if len(one) > 100)
    assert any(one.endswith("matter, one looks as if it did.") for one in paragraphs)
    assert any(one.endswith("come after the hits are looked at, too.") for one in paragraphs)
    assert len(page.all("h1")[0]["text"]) == 400
    assert len(page.all("h3")[0]["text"]) == 400 + len("Image 1: ")


def test_with_pictures_of_512_pixels_eight_queries_and_eight_hits_stay_under_5_mb(tmp_path):
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(8, 3, 512, 512, generator=generator) * 2 - 1  # as large as pictures get

    class Noisy:
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return noise[index % 8]

    found(40, 8).report(tmp_path / "report.html", Noisy(), noise)
    assert (tmp_path / "report.html").stat().st_size < 5 * 10**6
    for one in parsed(tmp_path / "report.html").all("img"):
        picture = Image.open(io.BytesIO(base64.b64decode(one["at"]["src"].partition(",")[2])))
        assert max(picture.size) <= 464


def test_nothing_that_a_camera_wrote_into_a_picture_is_in_the_report():
    image = Image.new("RGB", (100, 80))
    exif = Image.Exif()
    exif[0x010E] = "my home address"
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif, icc_profile=b"my profile")
    opened = Image.open(io.BytesIO(file.getvalue()))
    for side in (64, 90):
        kind, content = encoded(opened, side, 10**5)
        assert kind == "jpeg"
        assert set(Image.open(io.BytesIO(content)).info) <= {
            "jfif",
            "jfif_version",
            "jfif_unit",
        } | {"jfif_density"}
    small = opened.resize((20, 20))
    assert small.info["icc_profile"] == b"my profile"  # PIL would write it
    assert not Image.open(io.BytesIO(encoded(small, 64, 10**5)[1])).info


def test_a_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("the old one")

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(WherefromError, match="untouched"):
        found().report(path, coloured())
    assert path.read_text() == "the old one"
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_the_same_attribution_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        found().report(tmp_path / f"{name}.html", coloured())
        found().contact_sheet(tmp_path / f"{name}.png", coloured())
    for kind in ("html", "png"):
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()


def test_what_is_not_known_is_said_to_be_unknown(tmp_path):
    top = TopK(3, 60)
    top.add(torch.arange(20), torch.rand(1, 20))  # some of them alone, as a search proposes
    hits = top.result({})
    hits.report(tmp_path / "report.html", coloured())
    page = parsed(tmp_path / "report.html")
    card = page.all("article")[0]["text"]
    assert "not known how far above the rest" in card
    assert "was not measured" in card
    assert "too few hits" in card
    assert "nan" not in card
    assert not page.all("svg", role="img")
    hits.to_json(tmp_path / "hits.json", coloured())
    query = json.loads((tmp_path / "hits.json").read_text())["queries"][0]
    assert query["stability"] is query["histogram"] is query["most"][0]["percentile"] is None
    hits.to_csv(tmp_path / "hits.csv")
    row = rows_of(tmp_path / "hits.csv")[0]
    assert row["standardised"] == row["percentile"] == row["stability"] == ""
    hits.contact_sheet(tmp_path / "sheet.png", coloured())


def test_scores_that_are_all_equal_and_a_top_of_everything_are_reported_too(tmp_path):
    both_ends(torch.ones(1, 60), 8).report(tmp_path / "r.html", coloured())
    card = parsed(tmp_path / "r.html").all("article")[0]["text"]
    assert "All training images score the same" in card
    assert "no step among these hits" in card
    for count in (1, 8):
        hits = both_ends(torch.rand(1, count), count)
        hits.report(tmp_path / "r.html", coloured(count))
        assert "nan" not in parsed(tmp_path / "r.html").all("article")[0]["text"]


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_every_text_has_the_contrast_that_people_need(scheme):
    blocks = re.findall(r":root\{(.*?)\}", STYLE, re.DOTALL)
    colours = dict(re.findall(r"--(\w+):(#\w+)", blocks[0]))
    colours |= dict(re.findall(r"--(\w+):(#\w+)", blocks[["light", "dark", "print"].index(scheme)]))

    def light(name):
        digits = colours[name][1:]
        digits = digits if len(digits) == 6 else "".join(2 * one for one in digits)
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for ink, paper in itertools.product(("ink", "pale", "hit", "link"), ("paper", "card")):
        high, low = sorted([light(ink), light(paper)], reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, paper)
    for ink in ("ink", "pale"):  # on badges and empty places
        high, low = sorted([light(ink), light("quiet")], reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, ink


def test_a_set_that_cannot_be_the_one_attributed_to_is_refused(tmp_path):
    hits = found()
    for write in (hits.report, hits.to_csv, hits.to_json, hits.contact_sheet):
        with pytest.raises(
            WherefromError, match=r"item \d+ was found, and the data set has only 5"
        ):
            write(tmp_path / "x", coloured(5))
    with pytest.raises(WherefromError, match="60 items were attributed to, and this one has 70"):
        hits.report(tmp_path / "x", coloured(70))  # a mean of all 60 would stand beside 70
    with pytest.raises(WherefromError, match="3 queries and 2 were attributed"):
        hits.report(tmp_path / "x", coloured(), coloured(3))
    with pytest.raises(WherefromError, match=r"x\[None\]"):
        hits.report(tmp_path / "x", coloured(), torch.zeros(3, 8, 8))
    with pytest.raises(WherefromError, match=r"shape \(4, 8, 8\)"):
        hits.report(tmp_path / "x", coloured(), torch.zeros(2, 4, 8, 8))
    with pytest.raises(WherefromError, match="give the data set"):
        hits.report(tmp_path / "x", None)
    with pytest.raises(WherefromError, match="metadata is of the items"):
        hits.to_csv(tmp_path / "x", metadata={"a": [1]})
    assert not list(tmp_path.iterdir())


def test_without_pillow_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    for write in (found().report, found().contact_sheet):
        with pytest.raises(WherefromError, match=r"pip install 'wherefrom\[report\]'"):
            write(tmp_path / "x", coloured())
    found().to_csv(tmp_path / "hits.csv", coloured())  # needs none
    found().to_json(tmp_path / "hits.json", coloured())


def test_an_attribution_of_the_library_is_reported_from_end_to_end(tmp_path):
    dataset = Noise(30)
    pixels = wherefrom.baselines.Pixel().fit(dataset)
    pixels.attribute(dataset.x[:3], dataset, 5).report(tmp_path / "r.html", dataset, dataset.x[:3])
    page = parsed(tmp_path / "r.html")
    assert "+" in page.all("strong")[0]["text"]
    assert page.all("td")[0]["text"].startswith("Pixel")


def test_the_guides_example_runs(tmp_path, monkeypatch):
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    code = re.search(r"<!-- tried: report -->\n\n```python\n(.*?)```", guide, re.DOTALL).group(1)
    dataset = Noise(20)
    draws = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), 2)
    denoiser = wherefrom.Denoiser(stirred(small_dit()), wherefrom.EDM())
    tid = wherefrom.TID(denoiser, draws).fit(dataset)
    monkeypatch.chdir(tmp_path)
    artists = ["A", "B"] * 10
    exec(code, {"tid": tid, "images": dataset.x[:2], "dataset": dataset, "artists": artists})
    names = {"report.html", "hits.png", "hits.csv", "hits.json"}
    assert {one.name for one in tmp_path.iterdir()} == names
    assert [one["text"] for one in parsed(tmp_path / "report.html").all("h3")][-1] == "By artist"


# --- groups ---------------------------------------------------------------------------------------


def test_totals_count_hits_and_compare_them_with_the_training_set():
    values = ["a"] * 10 + ["b"] * 80 + [""] * 10
    hits = torch.tensor([[0, 1, 2, 50], [3, 4, 60, 99]])
    groups = {one.name: one for one in totals(values, hits)}
    assert [one.hits for one in groups.values()] == [5, 2, 1]
    assert groups["a"].share == 5 / 8
    assert (groups["a"].training, groups["b"].training, groups[""].training) == (0.1, 0.8, 0.1)
    assert groups["a"].verdict == "more"
    assert groups["b"].verdict == "fewer"
    assert groups[""].verdict == "as many"


def test_intervals_are_those_of_drawing_queries_and_their_hits_again():
    generator = torch.Generator().manual_seed(1)
    hits = torch.randint(100, (12, 8), generator=generator)
    values = ["a" if index < 40 else "b" for index in range(100)]
    group = totals(values, hits)[0]
    rng = np.random.default_rng(5)
    mine = np.array([[values[i] == group.name for i in row] for row in hits.tolist()])
    shares = []
    for _ in range(4000):
        chosen = mine[rng.integers(12, size=12)]
        shares.append(np.mean([row[rng.integers(8, size=8)].mean() for row in chosen]))
    low, high = np.quantile(shares, [0.025, 0.975])
    assert group.low == pytest.approx(low, abs=0.02)
    assert group.high == pytest.approx(high, abs=0.02)
    assert totals(values, hits)[0] == group  # seeded


def test_a_group_without_hits_is_not_known_to_have_none():
    groups = {one.name: one for one in totals(["a"] * 5 + ["b"] * 95, torch.full((12, 8), 50))}
    assert (groups["a"].low, groups["a"].high) == (0, 3 / 12)
    assert groups["a"].verdict == "as many"
    assert (groups["b"].low, groups["b"].high) == (1 - 3 / 12, 1)
    alone = totals(["a"] * 50 + ["b"] * 50, torch.full((1, 8), 50))
    assert {one.verdict for one in alone} == {"as many"}  # of one query nothing is known


def test_many_groups_are_counted_together_and_shares_add_up():
    values = [f"artist {index % 40}" for index in range(400)]
    hits = torch.randint(400, (8, 8), generator=torch.Generator().manual_seed(0))
    groups = totals(values, hits)
    assert len(groups) == 13
    assert (groups[-1].name, groups[-1].groups) == (None, 28)
    assert sum(one.hits for one in groups) == 64
    assert sum(one.training for one in groups) == pytest.approx(1)


def test_columns_that_have_groups_are_found_and_others_must_be_there():
    columns = {
        "label": ["a", "a", "b", "b"],
        "folder": ["x", "x", "y", "y"],  # the same division by other names
        "one": ["z"] * 4,
        "url": ["1", "2", "3", "4"],
        "artist": ["p", "q", "p", "q"],
    }
    assert chosen_columns(columns, None) == [("artist",), ("label", "folder")]
    assert chosen_columns(columns, "url") == [("url",)]
    assert chosen_columns(columns, []) == []
    with pytest.raises(WherefromError, match="no column 'painter'"):
        chosen_columns(columns, ["painter"])
    for wrong in (3, [3], {"artist": 1}):
        with pytest.raises(WherefromError, match="group is"):
            chosen_columns(columns, wrong)


def test_a_column_that_people_wrote_is_shown_where_it_divides_as_the_folders_do(tmp_path):
    for name in ("a/1", "a/2", "b/1", "b/2"):
        path = tmp_path / "pictures" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    dataset = wherefrom.data.folder(tmp_path / "pictures", labels=True)
    artists = {"artist": ["Ann", "Ann", "Bob", "Bob"]}
    hits = both_ends(torch.rand(4, 4, generator=torch.Generator().manual_seed(0)), 2)
    hits.report(tmp_path / "r.html", dataset, metadata=artists)
    page = parsed(tmp_path / "r.html")
    heading = [one["text"] for one in page.all("h3")][-1]
    assert heading == "By artist, as label and folder divide them, too"
    assert {one["text"] for one in page.all("th", scope="row")} >= {"Ann", "Bob"}


@pytest.mark.parametrize(
    ("queries", "said"), [(1, "One image: its hits"), (3, "3 images: their hits"), (4, None)]
)
def test_of_a_few_images_counts_are_told_and_no_intervals_or_verdicts(tmp_path, queries, said):
    found(queries=queries).report(tmp_path / "r.html", coloured())
    page = parsed(tmp_path / "r.html")
    cells = [one["text"] for one in page.all("td") if "section" in one["inside"]]
    shares = [one for one in cells if " times" in one]
    told = [one["text"] for one in page.all("p") if "section" in one["inside"]]
    assert any("chance" in one for one in shares) == (said is None)
    assert any(" % to " in one or " to 100" in one for one in cells) == (said is None)
    assert bool(page.all("line", **{"class": "reach"})) == (said is None)
    assert any("interval of 95" in one for one in told) == (said is None)
    assert said is None or any(f"{said} cannot tell chance from more" in one for one in told)


def test_the_page_shows_the_groups_that_are_asked_for(tmp_path):
    dataset = coloured()
    artists = {"artist": ["A & B" if index == 7 else "C" for index in range(60)]}
    found().report(tmp_path / "r.html", dataset, metadata=artists, group="artist")
    page = parsed(tmp_path / "r.html")
    assert [one["text"] for one in page.all("h3")][-1] == "By artist"
    rows = [one["text"] for one in page.all("th", scope="row")]
    assert rows[:2] == ["C", "A & B"]


# --- standing apart -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["squares", "exponential", "normal"])
def test_of_noise_about_one_in_twenty_looks_as_if_something_stood_apart(kind):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(600, 2000, generator=generator)
    if kind == "squares":
        scores = scores**2
    elif kind == "exponential":
        scores = torch.empty(600, 2000).exponential_(generator=generator)
    best = scores.topk(8, 1).values.tolist()
    share = sum(standing_apart(row) != 0 for row in best) / len(best)
    assert share <= 0.08


def test_what_was_planted_stands_apart():
    generator = torch.Generator().manual_seed(0)
    for planted in (1, 2, 3):
        scores = torch.randn(100, 2000, generator=generator) ** 2
        scores[:, :planted] = 60 + torch.randn(100, planted, generator=generator) ** 2
        best = scores.topk(8, 1).values.tolist()
        assert sum(standing_apart(row) == planted for row in best) >= 90


@pytest.mark.parametrize(
    ("top_k", "badge"),
    [
        (20, "the first 12 hits stand apart"),
        (12, "the first 12 hits stand apart"),
        (8, "all hits stand apart, and the 4 after them"),
    ],
)
def test_a_step_right_after_the_hits_or_a_little_further_is_seen(tmp_path, top_k, badge):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 60, generator=generator) ** 2
    scores[:, 20:32] += 40
    hits = both_ends(scores, top_k)
    assert (
        hits.next_scores[0].tolist()
        == scores[0].sort(descending=True).values[top_k : top_k + 16].tolist()
    )
    hits.report(tmp_path / "report.html", coloured())
    page = parsed(tmp_path / "report.html")
    assert [one["text"] for one in page.all("p", **{"class": "badge"})] == [badge]
    assert len(page.all("li", **{"class": "found"})) == min(top_k, 12)


def test_of_a_small_set_what_comes_after_the_hits_ends_with_it():
    hits = both_ends(torch.arange(12.0)[None], 5)
    assert hits.next_scores[0, :7].tolist() == [6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert hits.next_scores[0, 7:].isnan().all()


def test_too_few_hits_tell_nothing_and_equal_ones_do_not_stand_apart():
    assert standing_apart([9.0, 1.0, 0.9, 0.8]) is None
    assert standing_apart([3.0] * 8) == 0
    assert standing_apart([9.0, 9.0] + [1.0] * 6) == 2
    assert standing_apart([math.inf] + [1.0] * 7) is None


# --- tables and sheets ----------------------------------------------------------------------------


def test_csv_has_a_row_for_each_hit_and_reads_back(tmp_path):
    hits = found()
    columns = {"artist": [f"Zoë, no. {index}" for index in range(60)]}
    hits.to_csv(tmp_path / "hits.csv", coloured(), columns)
    raw = (tmp_path / "hits.csv").read_bytes()
    assert raw.startswith("\ufeff".encode())  # by which a spreadsheet knows UTF-8
    rows = rows_of(tmp_path / "hits.csv")
    assert len(rows) == 2 * 2 * 8
    most = [row for row in rows if (row["query"], row["influence"]) == ("1", "most")]
    assert [int(row["index"]) for row in most] == hits.indices[1].tolist()
    assert [int(row["rank"]) for row in most] == list(range(1, 9))
    assert [float(row["score"]) for row in most] == hits.scores[1].tolist()
    assert [float(row["standardised"]) for row in most] == hits.standardised[1].tolist()
    assert most[0]["artist"] == f"Zoë, no. {most[0]['index']}"
    assert most[0]["label"] == str(int(most[0]["index"]) % 3)


def test_a_column_that_is_called_like_one_of_ours_is_told_from_it(tmp_path):
    names = {"name": ["theirs"] * 60, "score": ["9"] * 60}
    found().to_csv(tmp_path / "hits.csv", coloured(), names)
    row = rows_of(tmp_path / "hits.csv")[0]
    assert (row["name"], row["name (metadata)"]) == ("7", "theirs")
    assert (row["score"], row["score (metadata)"]) == ("60.0", "9")


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t'=1"),
        ("  =1", "'  =1"),
        ("\uff1d1", "'\uff1d1"),
        ("-5", "-5"),  # a number is one
        ("+1.5", "+1.5"),
        ("a = b", "a = b"),
        ('say "hi", you', 'say "hi", you'),
        ("two\nlines", "two\nlines"),
        ("nice;=HYPERLINK(1)", "nice;'=HYPERLINK(1)"),  # where cells are split at ;
        ("a\t@SUM(A1)", "a\t'@SUM(A1)"),
        ("a\n=1", "a\n'=1"),
        ('a; "=1"', 'a;\' "=1"'),
        ("=1;=2", "'=1;'=2"),
        ("a;-5", "a;-5"),
        ("a;-5+1", "a;'-5+1"),
        ("a;b=c", "a;b=c"),
    ],
)
def test_no_text_in_csv_is_a_formula(tmp_path, cell, written):
    found().to_csv(tmp_path / "hits.csv", coloured(), {"artist": [cell] * 60, cell: ["x"] * 60})
    raw = (tmp_path / "hits.csv").read_bytes().decode("utf-8-sig")
    rows = list(csv.reader(io.StringIO(raw, newline="")))
    assert rows[0][-1] == written
    assert {row[-2] for row in rows[1:]} == {written}
    assert len({len(row) for row in rows}) == 1


def test_an_attribution_shows_itself_in_one_short_line():
    first, second = (", ".join(map(str, row[:3].tolist())) for row in found().indices)
    shown = f"<Attribution of 2 queries by TID, top 8; 0: {first}, ...; 1: {second}, ...>"
    assert repr(found()) == shown
    assert repr(both_ends(torch.tensor([[1.0, 2.0]]), 2)) == (
        "<Attribution of 1 query by some method, top 2; 0: 1, 0>"
    )
    assert len(repr(found(queries=500))) < 200


def test_one_image_is_not_called_each(tmp_path):
    for queries, said in ((1, "1 generated image, beside those"), (2, "images, each beside those")):
        found(queries=queries).report(tmp_path / "r.html", coloured())
        assert said in parsed(tmp_path / "r.html").all("p", **{"class": "lead"})[0]["text"]


def test_json_holds_everything_and_texts_as_they_are(tmp_path):
    hits = found()
    hits.to_json(tmp_path / "hits.json", coloured(), {"artist": ["=1+1 <b> \udcff"] * 60})
    told = json.loads((tmp_path / "hits.json").read_text())
    assert told["about"] == {"method": "TID", "draws": 4, "teacher": {"damping": 0.1}}
    first = told["queries"][0]
    assert [one["index"] for one in first["most"]] == hits.indices[0].tolist()
    assert [one["score"] for one in first["least"]] == hits.least_scores[0].tolist()
    assert first["most"][0]["columns"] == {"label": "1", "artist": "=1+1 <b> \udcff"}
    assert sum(first["histogram"]["counts"]) == 60
    assert first["standing_apart"] == 1
    hits.to_json(tmp_path / "bare.json")
    assert "name" not in json.loads((tmp_path / "bare.json").read_text())["queries"][0]["most"][0]


def test_a_contact_sheet_has_a_row_for_each_query_and_a_place_for_each_hit(tmp_path):
    hits = found(queries=3, top_k=4)
    black = wherefrom.data.Images(np.zeros((60, 3, 8, 8), dtype=np.uint8))
    hits.contact_sheet(tmp_path / "sheet.png", black, torch.full((3, 3, 8, 8), -1.0))
    sheet = np.array(Image.open(tmp_path / "sheet.png").convert("L"))
    dark = sheet[:, :] == 0
    assert dark.sum() >= 3 * 5 * 128 * 128  # pictures of 128 pixels, small ones made as large
    rows = np.flatnonzero(dark.sum(1) >= 5 * 128)
    assert len(rows) == 3 * 128
    hits.contact_sheet(tmp_path / "bare.png", black)
    assert Image.open(tmp_path / "bare.png").width < Image.open(tmp_path / "sheet.png").width


def test_a_sheet_takes_captions_of_any_length_and_kind(tmp_path):
    class Worded(Pictures):
        def caption(self, index):
            return HOSTILE[index % len(HOSTILE)] * 500

    found().contact_sheet(tmp_path / "sheet.png", Worded(coloured()))
    assert Image.open(tmp_path / "sheet.png").size[0] < 2000


# --- what queries are called ----------------------------------------------------------------------

NAMES = ["seed-0003-star.png, star", "<b>seed-0004</b>\x1b"]


def test_a_report_calls_each_query_by_the_name_it_is_given(tmp_path):
    hits, dataset = found(), coloured()
    hits.report(tmp_path / "r.html", dataset, Subset(dataset, [3, 4]), names=NAMES)
    page = parsed(tmp_path / "r.html")
    titles = [one["text"] for one in page.all("h3") if "article" in one["inside"]]
    shown = ["Image 1: seed-0003-star.png, star", "Image 2: <b>seed-0004</b>\ufffd"]
    assert titles == shown
    contents = [one["text"] for one in page.all("a") if "nav" in one["inside"]]
    assert all(title in one for title, one in zip(shown, contents, strict=True))
    alts = [one["at"]["alt"] for one in page.all("img") if "article" in one["inside"]]
    assert alts[0] == "Generated image 1: seed-0003-star.png, star"
    assert alts[17] == "Generated image 2: <b>seed-0004</b>\ufffd"


def test_tables_and_sheets_take_the_names_of_queries_too(tmp_path):
    hits, dataset = found(), coloured()
    hits.to_csv(tmp_path / "hits.csv", dataset, names=["=1+1", "two"])
    assert [row["query_name"] for row in rows_of(tmp_path / "hits.csv")[::16]] == ["'=1+1", "two"]
    hits.to_csv(tmp_path / "bare.csv", names=["one", "two"])
    assert rows_of(tmp_path / "bare.csv")[0]["query_name"] == "one"
    hits.to_json(tmp_path / "hits.json", dataset, names=["one", "two"])
    told = json.loads((tmp_path / "hits.json").read_text())
    assert [one["name"] for one in told["queries"]] == ["one", "two"]
    for number, names in enumerate([["one", "two"], None]):
        hits.contact_sheet(
            tmp_path / f"{number}.png", dataset, Subset(dataset, [3, 4]), names=names
        )
    assert (tmp_path / "0.png").read_bytes() != (tmp_path / "1.png").read_bytes()


def test_a_name_that_is_the_prompt_is_said_once_and_an_empty_one_leaves_the_number(tmp_path):
    prompts = Pictures([Image.new("RGB", (8, 8))] * 2)
    prompts._texts = ["a cat", "a dog"]
    found().report(tmp_path / "r.html", coloured(), prompts, names=["a cat", ""])
    cards = [one["text"] for one in parsed(tmp_path / "r.html").all("article")]
    assert cards[0].startswith("Image 1: a cat")
    assert cards[0].count("a cat") == 1
    assert cards[1].startswith("Image 2“a dog”")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["one"], "names has 1 texts and 2 queries"),
        ("ab", "names is 'ab'"),
        ([1, 2], r"names is \[1, 2\]"),
        (7, "names is 7"),
    ],
)
def test_names_that_do_not_fit_the_queries_are_refused(tmp_path, names, said):
    for write in (found().report, found().to_csv, found().to_json, found().contact_sheet):
        with pytest.raises(WherefromError, match=said):
            write(tmp_path / "x", coloured(), names=names)


# --- which data they are of -----------------------------------------------------------------------


def writers(hits):
    return hits.report, hits.to_csv, hits.to_json, hits.contact_sheet


def test_hits_shown_with_another_data_set_of_the_same_length_are_refused(tmp_path):
    dataset = Noise(30).x
    other = -dataset
    hits = wherefrom.baselines.Pixel().fit(dataset).attribute(dataset[:2], dataset, 4)
    for write in writers(hits):
        write(tmp_path / "x", dataset)
        with pytest.raises(WherefromError, match="these hits are of another data set"):
            write(tmp_path / "x", other)
        with pytest.raises(WherefromError, match="these hits are of another data set"):
            write(tmp_path / "x", Pictures(other))


def test_a_part_that_is_all_of_a_set_is_that_set_and_another_order_is_not(tmp_path):
    dataset = coloured()
    hits = wherefrom.baselines.Pixel().fit(dataset).attribute(Subset(dataset, [0, 1]), dataset, 4)
    assert hits.about["data"] == [
        {"images": 60, "fingerprint": wherefrom.data.fingerprint.data_fingerprint(dataset)}
    ]
    hits.to_csv(tmp_path / "x", Subset(dataset, range(60)))
    hits.to_csv(tmp_path / "x", Subset(Subset(dataset, range(60)), list(range(60))))
    with pytest.raises(WherefromError, match="another data set"):
        hits.to_csv(tmp_path / "x", Subset(dataset, range(59, -1, -1)))


def test_a_set_whose_fingerprint_nobody_knows_is_known_by_its_length_alone(tmp_path):
    items = [torch.zeros(1, 8, 8)] * 30
    hits = both_ends(torch.rand(1, 30), 4, about={"method": "mine"})
    hits.to_csv(tmp_path / "x", items)
    hits.about.update(of_sets([(30, "0123456789abcdef")]))
    hits.to_csv(tmp_path / "x", items)
    with pytest.raises(WherefromError, match="30 items were attributed to, and this one has 31"):
        hits.to_csv(tmp_path / "x", [*items, items[0]])


def test_the_settings_name_the_set_that_was_attributed_to(tmp_path):
    hits = both_ends(torch.rand(1, 30), 4, about={"method": "mine", "proposed": {"data": 3}})
    hits.report(tmp_path / "r.html", [torch.zeros(1, 8, 8)] * 30)
    names = [one["text"] for one in parsed(tmp_path / "r.html").all("td")]
    assert "was not noted" in names
    hits.about.update(of_sets([(28, "first"), (2, "second")]))
    hits.report(tmp_path / "r.html", [torch.zeros(1, 8, 8)] * 30)
    page = parsed(tmp_path / "r.html")
    heads = [one["text"] for one in page.all("th", scope="row")]
    rows = dict(zip(heads, [one["text"] for one in page.all("td")], strict=True))
    assert rows["fingerprint of the data set"] == "first"
    assert rows["fingerprint of the 2 appended"] == "second"
    assert "data" not in rows


def test_hits_of_an_index_know_its_data_what_was_appended_and_what_was_deleted(tmp_path):
    first, more = Noise(20).x, -Noise(4).x
    draws = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), 2)
    denoiser = wherefrom.Denoiser(stirred(small_dit()), wherefrom.EDM())
    index = wherefrom.TID(denoiser, draws).fit(first).index(first, dim=16)
    index.search(first[:1], 3).to_csv(tmp_path / "x", first)
    index.append(more)
    index.delete([2])
    hits = index.search(first[:1], 3)
    both = ConcatDataset([first, more])
    hits.report(tmp_path / "r.html", both)
    lead = parsed(tmp_path / "r.html").all("p", **{"class": "lead"})[0]["text"]
    assert "those of 23 training images" in lead
    looked = index.search(first[:1], 3, exact=0.5, dataset=torch.cat([first, more]))
    for one in (hits, looked):
        one.to_csv(tmp_path / "x", torch.cat([first, more]))  # cannot be taken apart: by length
        one.to_csv(tmp_path / "x", ConcatDataset([first, more]))
        with pytest.raises(WherefromError, match="these hits are of another data set"):
            one.to_csv(tmp_path / "x", ConcatDataset([first, -more]))
        with pytest.raises(WherefromError, match="24 items were attributed to"):
            one.to_csv(tmp_path / "x", torch.cat([first, more, more]))
    assert "data" not in looked.about["proposed_by"]
