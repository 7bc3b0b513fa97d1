"""The page in a real browser: one visitor's whole way through it, and what is refused."""

import hashlib
import io
import json
import re
import time
import urllib.request
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import real
import torch
from PIL import Image
from playwright.sync_api import Page, expect
from safetensors.torch import save_file
from visiting import SMALL, WAIT, chromium, painted, pixels, running

import relprop
from relprop.figure import glow, limit
from relprop.heatmap import colorize, heat_quantization
from relprop.images import PHOTO, SAMPLES

expect.set_options(timeout=WAIT)


def opened(browser: Any, address: str, asked: set[str], **options: Any) -> Page:
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(WAIT)
    page.on("request", lambda request: asked.add(request.url))
    page.goto(address)
    page.locator("#photo input[type=file]").wait_for(state="attached")
    return page


def choose(page: Page, where: str, text: str) -> None:
    """Types into a list that can be searched, and takes what is found: with the keyboard alone."""
    field = page.locator(f"{where} input").first
    field.click()
    field.fill(text)
    field.press("ArrowDown")
    field.press("Enter")


def set_slider(page: Page, where: str, value: int) -> None:
    page.locator(where).first.evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", value)


def headline(page: Page, text: str) -> None:
    expect(page.locator("#headline h2")).to_contain_text(text)


def unseen(page: Page) -> list[str]:
    """Pictures that a screen reader cannot tell of."""
    script = """() => {
      const all = (root) => [...root.querySelectorAll('*')].flatMap(
        e => [e, ...(e.shadowRoot ? all(e.shadowRoot) : [])]);
      const shown = (e) => e.checkVisibility() && !e.closest('button, [aria-hidden=true]');
      const said = (e) => e.getAttribute('alt') || e.getAttribute('aria-label');
      return all(document).filter(e => (e.matches('img, canvas') || e.matches('.rp svg')) && shown(e) && !said(e))
        .map(e => e.outerHTML.slice(0, 120)); }"""
    return list(page.evaluate(script))


def assert_fits(page: Page) -> None:
    """Nothing sticks out to the right."""
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth + 1")


def test_a_visit(tmp_path: Path) -> None:
    model = real.load("resnet50", "keras")
    explained = relprop.explain(model, model.prepare(PHOTO)[None])
    heatmap, crop = explained.heatmap[0], model.crop(PHOTO)
    asked: set[str] = set()
    with running("--model", "resnet50=keras") as server, chromium() as browser:
        page = opened(browser, server.address, asked, viewport={"width": 1280, "height": 900}, accept_downloads=True)

        # The right class, and the very pixels that Python paints.
        page.set_input_files("#photo input[type=file]", PHOTO)
        headline(page, "Egyptian cat, 78 %")
        assert painted(page, "#view") == "0 1 0.9 auto"
        first = pixels(page, "#view")
        shown = np.frombuffer(first, np.uint8).reshape(448, 448, 4)[::2, ::2, :3]
        assert (shown == colorize(heatmap, "RdBu_r", limit=limit(heatmap))).all()
        assert unseen(page) == []
        expect(page.locator("#headline")).to_contain_text("one part in")

        # Quantisation, opacity and colours act on the map that is there.
        set_slider(page, "#view .rp-levels", 4)
        assert painted(page, "#view") == "0 4 0.9 auto"
        shown = np.frombuffer(pixels(page, "#view"), np.uint8).reshape(448, 448, 4)[::2, ::2, :3]
        quantized = heat_quantization(heatmap, 4)
        assert (shown == colorize(quantized, "RdBu_r", limit=limit(heatmap))).all()
        assert pixels(page, "#view") != first
        page.locator("#view .rp-colours").select_option("RdBu_r")
        large = crop.resize((448, 448), Image.Resampling.BICUBIC)
        over = np.frombuffer(pixels(page, "#view", 1), np.uint8).reshape(448, 448, 4)[..., :3].astype(int)
        assert (
            np.abs(over - glow(quantized, large, limit(heatmap))).mean() < 2
        )  # the browser enlarges photos its own way
        set_slider(page, "#view .rp-levels", 1)

        # The value under the pointer, or under the arrow keys.
        page.locator("#view canvas").first.focus()
        page.keyboard.press("ArrowRight")
        value = page.locator("#view .rp-value").text_content() or ""
        assert value.startswith("column 113, row 112: ")
        assert float(re.search(r": (\S+),", value)[1]) == pytest.approx(float(heatmap[112, 113]), rel=0.01)
        page.locator("#view canvas").first.hover(position={"x": 5, "y": 5})
        expect(page.locator("#view .rp-value")).to_contain_text(re.compile(r"column [23], row [23]"))

        # Another class, by a click and by a search; then why one and not the other.
        page.locator("#top label", has_text="tiger cat").click()
        headline(page, "tiger cat")
        choose(page, "#target", "lynx")
        headline(page, "lynx")
        page.locator("#top label", has_text="Egyptian cat").click()
        headline(page, "Egyptian cat, 78 %")
        choose(page, "#contrast", "tabby")
        headline(page, "Egyptian cat, and not tabby")
        text = page.locator("#view canvas").first
        expect(text).to_have_attribute("aria-label", re.compile("speaks against it"))

        # Where it went: shares, and the map at a block.
        choose(page, "#contrast", "nothing")
        headline(page, "Egyptian cat, 78 %")
        page.get_by_role("tab", name="Where it went").click()
        expect(page.locator("#flow svg title")).to_have_count(16)
        before = pixels(page, "#flow")
        set_slider(page, "#flow .rp-stop", 0)
        expect(page.locator("#flow .rp-said").first).to_have_text("the input of avgpool (7 x 7)")
        assert pixels(page, "#flow") != before
        assert unseen(page) == []

        # Three methods, and one comparison that is stopped.
        page.get_by_role("tab", name="Compare").click()
        page.locator("#start").click()
        expect(page.locator("#progress progress")).to_be_visible()
        expect(page.locator("#progress .rp-done")).to_be_visible()
        expect(page.locator("#grid .rp-card h3")).to_have_text(["relprop", "grad-cam", "random"])
        expect(page.locator("#grid .rp-card").first.locator("td")).to_have_count(6)
        assert unseen(page) == []
        page.locator("#points label", has_text="as published").click()
        page.locator("#start").click()
        expect(page.locator("#progress progress")).to_be_visible()
        page.locator("#stop").click()
        expect(page.locator("#progress .rp-alert")).to_have_text("Stopped, as you asked.")

        # Take it away: every hash is right, and the report needs nobody.
        page.get_by_role("tab", name="Take it away").click()
        with page.expect_download() as bundle:
            page.locator("#bundle").click()
        check_bundle(Path(bundle.value.path()), explained)
        with page.expect_download() as report:
            page.locator("#report").click()
        file = tmp_path / "report.html"
        report.value.save_as(file)
        check_report(browser, file)

        # On a phone and on a projector nothing sticks out.
        for size in ({"width": 390, "height": 844}, {"width": 1920, "height": 1080}):
            page.set_viewport_size(size)
            for tab in ("Explain", "Where it went", "Compare", "Take it away"):
                page.get_by_role("tab", name=tab).click()
                assert_fits(page)
        hosts = {urlsplit(url).netloc for url in asked if url.startswith("http")}
        assert hosts == {urlsplit(server.address).netloc}
        with urllib.request.urlopen(server.address) as answer:
            assert set(re.findall(r'(?:src|href|content)="(https?://[^"]+)', answer.read().decode())) == set()

        # Nothing stays when the visitor leaves.
        folder = server.folder
        assert list((folder / "uploads").rglob("*.jpg"))
        page.context.close()
        assert gone(folder)
    assert "Traceback" not in server.said
    assert not folder.exists()


def gone(folder: Path) -> bool:
    for _ in range(200):
        if not [file for file in folder.rglob("*") if file.is_file() and file.name != ".lock"]:
            return True
        time.sleep(0.1)
    return False


def check_bundle(path: Path, explained: Any) -> None:
    with zipfile.ZipFile(path) as archive:
        files = {Path(name).name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(files["manifest.json"])
    assert {*manifest["files"], "manifest.json"} == set(files)
    assert all(hashlib.sha256(files[name]).hexdigest() == digest for name, digest in manifest["files"].items())
    assert {"figure.png", "photo.png", "relevance.npy"} <= set(files)
    assert np.allclose(np.load(io.BytesIO(files["relevance.npy"])), explained.relevance.numpy(), atol=1e-7)
    assert manifest["settings"]["image"] == "chelsea.jpg"


def check_report(browser: Any, file: Path) -> None:
    asked: list[str] = []
    page = browser.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    painted(page, "main")
    assert "Egyptian cat, 78 %" in (page.title() or "")
    set_slider(page, ".rp-levels", 3)
    assert painted(page, "main").startswith("0 3 ")
    assert unseen(page) == []
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]
    page.close()


def huge_png() -> bytes:
    file = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(file, format="PNG")
    return file.getvalue()


def test_bad_files_get_a_sentence_and_visitors_are_apart(tmp_path: Path) -> None:
    asked: set[str] = set()
    with running(*SMALL, "--max-photo", 0.5) as server, chromium() as browser:
        page = opened(browser, server.address, asked)

        def refused(name: str, content: bytes, kind: str, said: str) -> None:
            page.set_input_files("#photo input[type=file]", {"name": name, "mimeType": kind, "buffer": content})
            expect(page.locator("#notice [role=alert]")).to_contain_text(said)
            page.get_by_role("button", name="Clear").or_(page.get_by_label("Remove Image")).first.click()
            expect(page.locator("#notice [role=alert]")).to_have_count(0)

        whole = PHOTO.read_bytes()
        refused("words.png", b"hello, world\n" * 9, "image/png", "words.png is no image of a kind that can be read")
        refused("cut.jpg", whole[: len(whole) // 2], "image/jpeg", "cut.jpg is damaged or cut short")
        refused("huge.png", huge_png(), "image/png", "huge.png has far more pixels than the 50 million")
        noise = np.random.default_rng(0).integers(0, 255, (500, 500, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).save(file, format="PNG")
        refused("large.png", file.getvalue(), "image/png", "large.png has 0.8 MB and this server takes 0.5 at most")
        words = {"name": "words.txt", "mimeType": "text/plain", "buffer": b"hello"}
        page.set_input_files("#photo input[type=file]", words)
        expect(page.get_by_text("Invalid file type")).to_be_visible()  # Gradio's own sentence

        # Two visitors: each has their own photo, class and files.
        page.get_by_role("button", name="coffee").click()
        expect(page.locator("#view relprop-map")).to_have_attribute("data-view", re.compile("coffee.jpg"))
        other = opened(browser, server.address, asked)
        expect(other.locator("#view relprop-map")).to_have_count(0)
        assert other.locator("#photo img").count() == 0
        other.get_by_role("button", name="rocket").click()
        expect(other.locator("#view relprop-map")).to_have_attribute("data-view", re.compile("rocket.jpg"))
        expect(page.locator("#view relprop-map")).to_have_attribute("data-view", re.compile("coffee.jpg"))
        for each in (page, other):
            each.get_by_role("tab", name="Take it away").click()
        assert len({each.locator("#bundle").get_attribute("href") for each in (page, other)}) == 2
        page.get_by_role("tab", name="Explain").click()

        # Weights of one's own; those of another model get a sentence, and what was there stays.
        own, wrong = tmp_path / "own.safetensors", tmp_path / "wrong.safetensors"
        nasty = ["<img src=x onerror=alert(1)>", "${alert(2)} {{alert(3)}}"]
        net = relprop.load("resnet18", "random", classes=nasty)
        save_file(net.module.state_dict(), own, {"relprop": json.dumps({"classes": json.dumps(nasty)})})
        save_file({"fc.bias": torch.zeros(2)}, wrong)
        shouted: list[str] = []
        page.on("dialog", lambda dialog: (shouted.append(dialog.message), dialog.accept()))
        page.get_by_role("button", name="Your own weights").click()
        page.set_input_files("#checkpoint input[type=file]", wrong)
        expect(page.locator("#notice [role=alert]")).to_contain_text("Your checkpoint does not fit resnet18")
        page.get_by_label("Clear").last.click()
        page.set_input_files("#checkpoint input[type=file]", own)
        likeliest = int(net.module(net.prepare(SAMPLES["coffee"])[None]).argmax())
        headline(page, nasty[likeliest])  # as text: what a visitor's file says is never run
        page.locator("#top label", has_text=nasty[1 - likeliest]).click()
        headline(page, nasty[1 - likeliest])
        expect(page.locator("#notice [role=alert]")).to_have_count(0)
        name = "${alert(4)} {{alert(5)}} <img src=x onerror=alert(6)>.jpg"
        page.get_by_role("button", name="Clear").or_(page.get_by_label("Remove Image")).first.click()
        expect(page.locator("#view relprop-map")).to_have_count(0)
        page.set_input_files(
            "#photo input[type=file]", {"name": name, "mimeType": "image/jpeg", "buffer": PHOTO.read_bytes()}
        )
        expect(page.locator("#view img")).to_have_attribute("alt", f"The photo {name}, as the model sees it")
        assert shouted == []
        # Other weights are other weights: one's own are put away.
        choose(page, "#model", "resnet34")
        headline(page, "%")
        expect(page.locator("#headline h2")).not_to_contain_text("alert")
        hosts = {urlsplit(url).netloc for url in asked if url.startswith("http")}
        assert hosts == {urlsplit(server.address).netloc}
    assert "Traceback" not in server.said
