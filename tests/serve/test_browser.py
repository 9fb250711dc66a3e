"""Claims about the page as a person meets it, each in a browser: every flow, by mouse and by
keyboard, wide and narrow, light and dark.

With WHEREFROM_SCREENSHOTS=folder the page of the demo's run is photographed there (some minutes).
"""

from __future__ import annotations

import base64
import dataclasses
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from small_page import ARTISTS, HOSTILE, as_file, bench, marked, png

from wherefrom.cli.demo import run_demo
from wherefrom.runs.bench import Bench
from wherefrom.runs.run import Run
from wherefrom.serve import app

_SAID = "the page is not looked at: this needs playwright and Chromium"
try:
    from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright
except ImportError:
    pytest.skip(_SAID, allow_module_level=True)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if CHROMIUM is None:
    pytest.skip(_SAID, allow_module_level=True)
SCREENSHOTS = os.environ.get("WHEREFROM_SCREENSHOTS")
expect.set_options(timeout=20_000)


@contextmanager
def served(run: Bench, folder: Path, **how: Any) -> Iterator[str]:
    """A true server at a true address."""
    before = random.getstate()  # uvicorn and playwright take of these
    config = uvicorn.Config(app(run, folder, **how), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:  # a claim that fails would otherwise leave a server that pytest waits for
        server.should_exit = True
        thread.join()
        random.setstate(before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    before = random.getstate()
    with sync_playwright() as play:
        args = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        found = play.chromium.launch(executable_path=CHROMIUM, args=args)
        yield found
        found.close()
    random.setstate(before)


Visit = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens pages; whatever a page complains of, or asks of others, fails the test."""
    contexts, wrong = [], []

    def opened(address: str, width: int = 1280, scheme: str = "light", **how: Any) -> Page:
        size: Any = {"width": width, "height": 800}
        context = browser.new_context(viewport=size, color_scheme=scheme, **how)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        # what is refused is shown on the page; the browser writes it down, too
        page.on(
            "console",
            lambda said: (
                said.type == "error"
                and "Failed to load resource" not in said.text
                and wrong.append(said.text)
            ),
        )
        page.on(
            "request",
            lambda asked: (
                asked.url.startswith((address.split("#")[0], "data:", "blob:"))
                or wrong.append(asked.url)
            ),
        )
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def run() -> Bench:
    return bench()


@pytest.fixture
def address(run: Bench, tmp_path: Path) -> Iterator[str]:
    with served(run, tmp_path / "gallery") as found:
        yield found


def cards(page: Page) -> Locator:
    return page.locator("#cards:not(.waiting) .card")


def shown(page: Page) -> list[int]:
    """The sources in their order."""
    return [int(card.get_attribute("data-id") or -1) for card in cards(page).all()]


def asked(page: Page, seed: int = 3) -> list[int]:
    """Generate by mouse; the sources that are found."""
    page.get_by_label("Seed", exact=True).fill(str(seed))
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#asked-said")).to_have_text(f"seed {seed}")
    expect(page.locator("#then")).to_be_visible()
    return shown(page)


def test_an_image_forms_while_its_sources_fill_in_and_every_step_can_be_gone_back_to(
    visit: Visit, address: str, run: Bench
) -> None:
    page = visit(address)
    expect(page.locator("#nothing")).to_be_visible()
    page.evaluate(
        "window.seen = new Set(); new MutationObserver(() => window.seen.add("
        "document.getElementById('image').src.slice(0, 60))).observe("
        "document.getElementById('image'), {attributes: true})"
    )
    found = asked(page)
    assert found == run.collection.search(run.sample(3), top_k=12).indices[0].tolist()
    assert page.evaluate("[...window.seen].filter((one) => one.startsWith('data:')).length") >= 1
    slider = page.get_by_label("As it formed")
    slider.focus()
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    expect(page.locator("#step-said")).to_contain_text("step 1 of 4")
    assert "step=0" in (page.locator("#image").get_attribute("src") or "")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#step-said")).to_have_text("finished")
    expect(cards(page).first).to_have_attribute("data-id", str(found[0]))


def test_an_image_is_chosen_dropped_or_pasted(visit: Visit, address: str, run: Bench) -> None:
    page = visit(address)
    with page.expect_file_chooser() as chooser:
        page.get_by_text("Choose an image").click()
    chooser.value.set_files({"name": "two.png", "mimeType": "image/png", "buffer": png(run, 2)})
    expect(page.locator("#asked-said")).to_have_text("two.png")
    expect(cards(page).first).to_have_attribute("data-id", "2")
    give = """([bytes, name, kind, way]) => {
        const data = new DataTransfer();
        const content = Uint8Array.from(atob(bytes), (one) => one.charCodeAt(0));
        data.items.add(new File([content], name, { type: "image/png" }));
        if (way === "drop") for (const kind of ["dragover", "drop"]) document.body.dispatchEvent(
            new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
        else document.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data }));
    }"""
    for item, way in ((5, "drop"), (8, "paste")):
        content = base64.b64encode(png(run, item)).decode()
        page.evaluate(give, [content, f"{way}.png", "image/png", way])
        expect(page.locator("#asked-said")).to_have_text(f"{way}.png")
        expect(cards(page).first).to_have_attribute("data-id", str(item))
    expect(page.locator("#drop")).to_be_hidden()


def test_what_is_asked_before_the_run_is_known_waits_for_it(
    visit: Visit, address: str, run: Bench
) -> None:
    page = visit(address)
    held: list[Route] = []
    page.route("**/api/about", lambda route: held.append(route))
    with page.expect_request("**/api/about"):
        page.reload()
    for name in ("Generate", "Another seed"):
        expect(page.get_by_role("button", name=name)).to_be_disabled()
    page.get_by_label("Seed", exact=True).press("Enter")
    give(page, png(run, 2), "two.png")
    page.evaluate("new Promise((resolve) => setTimeout(resolve, 50))")  # the page has its turn
    expect(page.locator("#working")).to_be_hidden()
    expect(page.locator("#problem")).to_be_hidden()
    held[0].continue_()
    expect(page.locator("#asked-said")).to_have_text("two.png")
    expect(cards(page).first).to_have_attribute("data-id", "2")
    asked(page)


def test_a_source_is_looked_at_closely_and_its_words_are_only_words(
    visit: Visit, address: str
) -> None:
    page = visit(address)
    found = asked(page)
    odd = next(item for item in found if item % 2)
    page.locator(f"[data-id='{odd}'] .open").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator("#item-caption")).to_have_text(f"digit {odd} {HOSTILE}")
    expect(dialog.locator("#item-ranks")).to_contain_text(f"#{found.index(odd) + 1} of 40")
    expect(dialog.locator("#item-nearest li")).to_have_count(12)
    other = dialog.locator("#item-nearest .under").first.inner_text()
    dialog.locator("#item-nearest button").first.click()
    expect(dialog.locator("#item-name")).to_have_text(other)
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert page.evaluate("window.hurt") is None
    assert page.evaluate("document.querySelectorAll('[onerror]').length") == 0


def test_a_source_or_its_group_is_switched_off_and_on_again(visit: Visit, address: str) -> None:
    page = visit(address)
    found = asked(page)
    cards(page).first.hover()
    cards(page).first.locator(".out").click()
    expect(cards(page).first).to_have_attribute("data-id", str(found[1]))
    expect(page.locator("#found-said")).to_contain_text("39 of 40")
    cards(page).first.locator(".open").click()
    page.get_by_role("switch").nth(1).click()
    page.keyboard.press("Escape")
    expect(page.locator("#chips button")).to_have_count(2)
    left_out = {item for item in range(39) if item % 4 == found[1] % 4} | {found[0]}
    expect(page.locator("#found-said")).to_contain_text(f"{40 - len(left_out)} of 40")
    assert not left_out & set(shown(page))
    page.get_by_role("button", name="Put all back").click()
    expect(cards(page).first).to_have_attribute("data-id", str(found[0]))
    expect(page.locator("#left-out")).to_be_hidden()
    assert shown(page) == found


def test_a_case_is_settled_by_exact_tid(visit: Visit, address: str, run: Bench) -> None:
    page = visit(address)
    first = asked(page, 4)
    page.get_by_role("button", name="Settle it: exact TID on the best 24").click()
    expect(page.locator("#found-said")).to_contain_text("the best 24 settled by exact TID")
    item = run.sample(4)
    candidates = run.collection.search(item, top_k=24).indices[0].tolist()
    exact = run.tid.scores(item, run.dataset)[0]
    assert shown(page) == sorted(candidates, key=lambda one: -float(exact[one]))[:12]
    page.get_by_role("button", name="TIDE").click()
    expect(page.locator("#found-said")).to_contain_text("by TIDE")
    assert shown(page) == first


def test_the_report_is_downloaded(visit: Visit, address: str, tmp_path: Path) -> None:
    page = visit(address)
    asked(page)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the report").click()
    download.value.save_as(tmp_path / "report.html")
    assert "seed 3" in (tmp_path / "report.html").read_text()


def test_past_queries_are_there_after_a_restart_and_can_be_forgotten(
    visit: Visit, run: Bench, tmp_path: Path
) -> None:
    with served(run, tmp_path) as address:
        page = visit(address)
        before = [asked(page, seed) for seed in (1, 2)]
    with served(run, tmp_path) as address:
        page = visit(address)
        expect(page.locator("#past button")).to_have_count(2)
        expect(page.locator("#asked-said")).to_have_text("seed 2")
        page.get_by_role("button", name="Past query: seed 1").click()
        expect(page.locator("#asked-said")).to_have_text("seed 1")
        assert shown(page) == before[0]
        page.get_by_role("button", name="Forget this query").click()
        expect(page.locator("#past button")).to_have_count(1)


def test_what_is_refused_is_said_and_the_page_goes_on(visit: Visit, address: str) -> None:
    page = visit(address)
    large = as_file(__import__("PIL.Image").Image.new("L", (9000, 6000)))
    for content, words in ((b"no image", "This is no PNG"), (large, "54.0 million pixels")):
        page.locator("#file").set_input_files(
            {"name": "a.png", "mimeType": "image/png", "buffer": content}
        )
        expect(page.get_by_role("alert").first).to_contain_text(words)
    asked(page)
    expect(page.locator("#problem")).to_be_hidden()


def give(page: Page, content: bytes, name: str = "a.png") -> None:
    page.locator("#file").set_input_files(
        {"name": name, "mimeType": "image/png", "buffer": content}
    )


@pytest.fixture(scope="module")
def classed() -> Bench:
    return bench(classes=3)


def test_an_image_s_class_is_asked_for_in_place_and_what_is_answered_holds(
    visit: Visit, classed: Bench, tmp_path: Path
) -> None:
    with served(classed, tmp_path / "gallery") as address:
        page = visit(address)
        expect(page.locator("#run-name")).to_have_text("small")
        give(page, png(classed), "three.png")
        panel = page.get_by_role("form", name="Which class has “three.png”?")
        expect(panel).to_be_visible()
        expect(page.locator("#problem")).to_contain_text("Say which class this image has: class 0")
        expect(page.locator("#past button")).to_have_count(0)
        page.locator("#unsaid-class").select_option("class 0")  # the one that was preselected
        expect(page.locator("#asked-cond")).to_have_text("class “class 0”")
        expect(panel).to_be_hidden()
        expect(page.locator("#problem")).to_be_hidden()
        item = classed.query(classed.pictures.image(3), "class 0")
        assert shown(page) == classed.collection.search([item], top_k=12).indices[0].tolist()
        page.locator("#class").select_option("class 1")
        give(page, png(classed), "again.png")
        expect(page.locator("#asked-said")).to_have_text("again.png")
        expect(page.locator("#asked-cond")).to_have_text("class “class 1”")
        said = marked(classed.pictures.image(3), tmp_path, seed=1, cond=2)
        give(page, said, "said.png")
        expect(page.locator("#asked-cond")).to_have_text("class “class 2”")
        expect(page.locator("#notes")).to_contain_text("which is taken, not what was chosen")
        listed = page.locator("#past li").first
        expect(listed).to_contain_text("said.png")
        expect(listed).to_contain_text("class “class 2”")


def test_a_caption_that_nobody_typed_is_asked_for_and_enter_sends_the_file(
    visit: Visit, run: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a network of captions as far as the page knows: the words themselves go nowhere
    worded = dataclasses.replace(run, prompts=True)
    plain = run.space.query
    monkeypatch.setattr(run.space, "query", lambda image, _: plain(image, None))
    with served(worded, tmp_path) as address:
        page = visit(address)
        page.get_by_role("button", name="Generate").click()
        expect(page.locator("#problem")).to_contain_text("Say which caption to generate")
        give(page, png(run), "three.png")
        expect(page.locator("#unsaid")).to_be_visible()
        page.keyboard.press("Enter")  # nothing was typed
        expect(page.locator("#unsaid")).to_be_visible()
        page.keyboard.type("a dog")
        page.keyboard.press("Enter")
        expect(page.locator("#asked-cond")).to_have_text("caption “a dog”")
        expect(page.get_by_label("Caption", exact=True)).to_have_value("a dog")
        give(page, png(run), "another.png")
        expect(page.locator("#asked-said")).to_have_text("another.png")
        page.get_by_label("Caption", exact=True).fill("")
        give(page, png(run), "last.png")
        expect(page.locator("#unsaid")).to_be_visible()
        page.get_by_role("button", name="Never mind").click()
        expect(page.locator("#unsaid")).to_be_hidden()
        expect(page.locator("#asked-said")).to_have_text("another.png")


def test_what_is_left_after_a_group_is_gone_is_settled_and_reported(
    visit: Visit, address: str, run: Bench
) -> None:
    page = visit(address)
    asked(page, 4)
    page.get_by_role("button", name="Settle it: exact TID on the best 24").click()
    expect(page.locator("#found-said")).to_contain_text("the best 24 settled by exact TID")
    expect(page.locator("#settle")).to_be_hidden()
    cards(page).first.locator(".open").click()
    page.get_by_role("switch").nth(1).click()
    page.keyboard.press("Escape")
    expect(page.locator("#unsettled")).to_contain_text("of the best 24 that are left")
    page.get_by_role("button", name="more of the best 24").click()
    expect(page.locator("#found-said")).to_contain_text("the best 24 settled by exact TID")
    expect(page.locator("#unsettled")).to_be_hidden()
    artist = page.locator("#chips button").get_attribute("title")
    item = run.sample(4)
    order = run.collection.search(item, top_k=40).indices[0].tolist()
    left = [one for one in order if f"artist “{ARTISTS[one]}”" != artist][:24]
    exact = run.tid.scores(item, run.dataset)[0]
    assert shown(page) == sorted(left, key=lambda one: -float(exact[one]))[:12]
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the report").click()
    assert download.value.suggested_filename.startswith("small-seed-4-without-artist-")
    assert download.value.suggested_filename.endswith("-exact.html")
    assert f"without {artist}</title>" in Path(download.value.path()).read_text()


def test_what_is_refused_leaves_the_page_as_it_was(visit: Visit, address: str) -> None:
    page = visit(address)
    asked(page)
    cards(page).first.hover()
    cards(page).first.locator(".out").click()
    expect(page.locator("#found-said")).to_contain_text("39 of 40")
    before = shown(page)
    give(page, b"no image")
    expect(page.locator("#problem")).to_contain_text("This is no PNG")
    expect(page.locator("#live")).to_contain_text("This is no PNG")
    expect(page.locator("#working")).to_be_hidden()
    assert shown(page) == before
    for part in ("#image", "#then", "#steps", "#left-out", "#report"):
        expect(page.locator(part)).to_be_visible()
    expect(page.locator("#asked-said")).to_have_text("seed 3")


def test_cards_say_the_end_of_a_name_its_words_its_artist_and_sd_and_dots_are_dots(
    visit: Visit, run: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.pictures, "name", lambda item: f"artist_of_many/picture_{item:05d}.png")
    with served(run, tmp_path) as address:
        for width in (1280, 390):
            page = visit(address, width)
            item = asked(page)[1]
            card = cards(page).nth(1)
            tail = card.locator(".name .cut > :last-child")
            expect(tail).to_have_text(f"re_{item:05d}.png")
            # both in one look: a card may still be on its way to its place
            right, width, end = tail.evaluate(
                "(one) => { const [box, card] = [one, one.closest('.card')].map((its) =>"
                " its.getBoundingClientRect()); return [box.right, box.width, card.right]; }"
            )
            assert right <= end + 1
            assert width > 20
            expect(card.locator(".column")).to_contain_text(ARTISTS[item][-12:])
            odd = next(one for one in shown(page) if one % 2)
            expect(page.locator(f"[data-id='{odd}'] .caption")).to_contain_text(f"digit {odd}")
            expect(page.locator(f"[data-id='{odd}'] .caption")).to_be_visible()
            expect(card.locator(".score")).to_have_text(re.compile(r"^[+\u2212]\d+\.\d sd$"))
            for picture in ("#image", f"[data-id='{item}'] img"):
                expect(page.locator(picture)).to_have_css("image-rendering", "pixelated")


def test_the_token_comes_with_the_link_or_is_asked_for(
    visit: Visit, run: Bench, tmp_path: Path
) -> None:
    token = "a token that is long enough"
    with served(run, tmp_path, token=token) as address:
        page = visit(f"{address}/#token={token.replace(' ', '%20')}")
        expect(page.locator("#run-name")).to_have_text("small")
        assert "token" not in page.url
        asked(page)
        other = visit(address)
        other.locator("#token").fill("wrong")
        other.get_by_role("button", name="Enter").click()
        expect(other.locator("#enter-said")).to_have_text("this is not the server's token")
        other.locator("#token").fill(token)
        other.get_by_role("button", name="Enter").click()
        expect(other.locator("#run-name")).to_have_text("small")


def test_all_of_it_goes_by_keyboard(visit: Visit, address: str) -> None:
    page = visit(address)
    expect(page.locator("#run-name")).to_have_text("small")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.get_by_label("Seed", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.locator("#then")).to_be_visible()
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        here = page.evaluate(
            "(() => { const one = document.activeElement; const style = getComputedStyle(one);"
            " return [one.id || one.className, style.outlineStyle, one.getAttribute('aria-label')"
            " || one.textContent.trim() || one.labels?.[0]?.textContent.trim() || ''] })()"
        )
        reached.append(here[0])
        if here[0] not in ("", "file unseen", "file"):
            assert here[1] != "none", f"{here[0]} does not show that it has the focus"
            assert here[2], f"{here[0]} has no name"
    for wanted in ("dice", "generate", "file", "step", "open", "out", "settle", "report"):
        assert wanted in reached
    cards(page).first.locator(".open").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "open"


CONTRAST = """() => {
  const numbers = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).slice(0, 3).map((one) => one / 255).map(
      (one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (numbers(colour).length === 3 || numbers(colour)[3] > 0.99) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const poor = [];
  for (const one of document.body.querySelectorAll("*")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !one.checkVisibility({ opacityProperty: true }) || one.disabled) continue;
    if (one.closest(".unseen, .skip, #drop, option")) continue;
    const [high, low] = [light(getComputedStyle(one).color), light(ground(one))]
      .sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) poor.push([one.id || one.className || one.tagName, ratio]);
  }
  return poor;
}"""


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_wide_and_narrow_light_and_dark_it_is_read_well(
    visit: Visit, address: str, width: int, scheme: str
) -> None:
    page = visit(address, width, scheme, reduced_motion="reduce")
    expect(page.locator("#run-name")).to_have_text("small")
    for state in ("empty", "found", "left out", "source", "refused"):
        if state == "found":
            asked(page)
        elif state == "left out":
            cards(page).first.hover()
            cards(page).first.locator(".out").click()
            expect(page.locator("#left-out")).to_be_visible()
        elif state == "source":
            cards(page).first.locator(".open").click()
            expect(page.locator("#item-nearest li")).to_have_count(12)
        elif state == "refused":
            page.keyboard.press("Escape")
            page.locator("#file").set_input_files(
                {"name": "a.png", "mimeType": "image/png", "buffer": b"no"}
            )
            expect(page.locator("#problem")).to_be_visible()
        assert page.evaluate(CONTRAST) == [], state
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{state}: the page is {wide} wide"
        assert page.evaluate("document.getAnimations().length") == 0
    unnamed = page.evaluate(
        "[...document.querySelectorAll('img:not([alt]), button, a, input, select')].filter((one) =>"
        " one.tagName === 'IMG' || !(one.getAttribute('aria-label') || one.textContent.trim() ||"
        " one.labels?.length)).map((one) => one.outerHTML)"
    )
    assert [one for one in unnamed if "hidden" not in one] == []


@pytest.mark.skipif(SCREENSHOTS is None, reason="WHEREFROM_SCREENSHOTS names no folder")
def test_screenshots_for_the_docs(visit: Visit, tmp_path: Path) -> None:
    """Of the demo's run, which is made there first unless it lies there."""
    folder = Path(SCREENSHOTS or "")
    run_demo(folder / "wherefrom-demo", 0)
    run = Run.open(folder / "wherefrom-demo", device="cpu").bench()
    with served(run, tmp_path) as address:
        for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
            page = visit(address, width, scheme, reduced_motion="reduce")
            page.locator("#class").select_option("star")
            for seed in (1, 9, 4) if (width, scheme) == (1280, "light") else (4,):
                asked(page, seed)
            page.wait_for_load_state("networkidle")
            name = "page" if (width, scheme) == (1280, "light") else f"page-{width}-{scheme}"
            page.screenshot(path=folder / f"{name}.png", full_page=True)
            cards(page).first.locator(".open").click()
            expect(page.locator("#item-nearest li")).to_have_count(12)
            page.wait_for_load_state("networkidle")
            page.screenshot(path=folder / f"{name}-source.png")
