"""Image files: whatever a file holds, it is read as a viewer would show it, or refused in one sentence."""

import os
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from relprop import images
from relprop.errors import RelpropError

RED, WHITE, GREY = (255, 0, 0), (255, 255, 255), (128, 128, 128)


def jpeg(size: tuple[int, int] = (64, 48)) -> bytes:
    buffer = BytesIO()
    Image.effect_noise(size, 80).convert("RGB").save(buffer, "JPEG")
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int) -> bytes:
    """The beginning of a PNG that claims a size."""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


# -- reading --

MODES: dict[str, tuple[str, str, object, tuple[int, int, int]]] = {
    "rgb": ("RGB", "png", RED, RED),
    "grey": ("L", "png", 128, GREY),
    "1-bit": ("1", "png", 1, WHITE),
    "grey with alpha": ("LA", "png", (0, 0), WHITE),
    "transparent": ("RGBA", "png", (255, 0, 0, 0), WHITE),
    "half transparent": ("RGBA", "png", (255, 0, 0, 128), (255, 127, 127)),
    "opaque": ("RGBA", "webp", (255, 0, 0, 255), RED),
    "16-bit": ("I;16", "png", 128 * 257, GREY),
    "16-bit tiff": ("I;16", "tiff", 65535, WHITE),
    "16 of 32 bits": ("I", "tiff", 128 * 257, GREY),
    "cmyk": ("CMYK", "tiff", (0, 255, 255, 0), RED),
    "cmyk jpeg": ("CMYK", "jpg", (0, 0, 0, 0), WHITE),
    "ycbcr": ("YCbCr", "jpg", (128, 128, 128), GREY),
    "grey jpeg": ("L", "jpg", 128, GREY),
    "bitmap": ("RGB", "bmp", RED, RED),
    "portable pixmap": ("RGB", "ppm", RED, RED),
}


@pytest.mark.parametrize("kind", MODES)
def test_every_mode_becomes_rgb(kind: str, tmp_path: Path) -> None:
    mode, suffix, colour, expected = MODES[kind]
    if mode.startswith("I"):
        dtype = np.uint16 if mode == "I;16" else np.int32
        image = Image.fromarray(np.full((7, 9), colour, dtype))
    else:
        image = Image.new(mode, (9, 7), colour)
    image.save(tmp_path / f"x.{suffix}")
    picture = images.read(tmp_path / f"x.{suffix}")
    assert (picture.mode, picture.size) == ("RGB", (9, 7))
    assert np.abs(np.asarray(picture, dtype=int) - expected).max() <= 2


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(4, 0)
    Image.fromarray(ramp).save(tmp_path / "x.png")
    assert np.abs(np.asarray(images.read(tmp_path / "x.png"))[0, :, 0].astype(int) - np.arange(256)).max() == 0


def test_a_palette_is_looked_up_and_its_transparent_colour_is_white(tmp_path: Path) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 255, 255, 0, 0])
    image.putpixel((0, 0), 0)
    image.save(tmp_path / "x.png")
    image.save(tmp_path / "y.gif", transparency=0)
    assert images.read(tmp_path / "x.png").getpixel((0, 0)) == (0, 0, 255)
    assert images.read(tmp_path / "y.gif").getpixel((0, 0)) == WHITE
    assert images.read(tmp_path / "y.gif").getpixel((3, 3)) == RED


@pytest.mark.parametrize("suffix", ["gif", "webp", "tiff", "png"])
def test_of_an_animation_the_first_frame_is_read(suffix: str, tmp_path: Path) -> None:
    others = [Image.new("RGB", (8, 8), "blue"), Image.new("RGB", (8, 8), "green")]
    Image.new("RGB", (8, 8), "red").save(tmp_path / f"x.{suffix}", save_all=True, append_images=others)
    assert np.abs(np.asarray(images.read(tmp_path / f"x.{suffix}"), dtype=int) - RED).max() <= 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied_once(orientation: int, tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20), "white")
    image.paste("black", (0, 0, 10, 10))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "x.png", exif=exif)
    picture = images.read(tmp_path / "x.png")
    assert picture.size == ((40, 20) if orientation <= 4 else (20, 40))
    corners = [(x * (picture.width - 1), y * (picture.height - 1)) for y in (0, 1) for x in (0, 1)]
    dark = [picture.getpixel(corner) == (0, 0, 0) for corner in corners]
    assert dark.index(True) == {1: 0, 2: 1, 3: 3, 4: 2, 5: 0, 6: 1, 7: 3, 8: 2}[orientation]
    assert not picture.info
    assert not picture.getexif()


def test_damaged_exif_data_does_not_cost_a_sound_image(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "x.jpg", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")
    assert images.read(tmp_path / "x.jpg").size == (8, 8)


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (3000, 2)])
def test_small_and_narrow_images_are_read(size: tuple[int, int], tmp_path: Path) -> None:
    Image.new("RGB", size, "red").save(tmp_path / "x.png")
    assert images.read(tmp_path / "x.png").size == size


def test_a_very_large_jpeg_is_decoded_smaller(tmp_path: Path) -> None:
    Image.new("L", (9000, 6000), 128).save(tmp_path / "x.jpg")
    width, height = images.read(tmp_path / "x.jpg").size
    assert min(width, height) >= 2048
    assert width * height < 9000 * 6000


def test_the_bundled_photo_is_a_small_photo() -> None:
    assert images.read(images.PHOTO).size == (451, 300)
    assert images.PHOTO.stat().st_size < 100_000
    assert "CC0" in images.PHOTO.with_name("README.md").read_text()


# -- refusing --

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "text": (b"this is no image\n", "no image of a kind"),
    "html": (b"<!DOCTYPE html><html></html>", "no image of a kind"),
    "zeros": (bytes(4096), "no image of a kind"),
    "zip": (b"PK\x03\x04" + bytes(100), "no image of a kind"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "no image of a kind"),
    "jpeg-cut": (jpeg()[:700], "damaged or cut short"),
    "jpeg-head": (jpeg()[:20], "no image of a kind|damaged or cut short"),
    "jpeg-one-byte": (b"\xff", "no image of a kind"),
    "png-cut": (png_header(64, 64) + chunk(b"IDAT", zlib.compress(bytes(64 * 193))[:9]), "damaged or cut short"),
    "png-no-data": (png_header(64, 64) + chunk(b"IEND", b""), "damaged or cut short"),
    "png-wrong-crc": (png_header(64, 64)[:-1] + b"\x00", "no image of a kind|damaged or cut short"),
    "png-no-pixels": (png_header(0, 64), "no image of a kind|damaged or cut short"),
    "png-bomb": (png_header(60_000, 60_000) + chunk(b"IDAT", bytes(9)), "more than 178 million pixels"),
    "gif-head": (b"GIF89a\x10\x00\x10\x00\x00\x00\x00", "no image of a kind|damaged or cut short"),
    "bmp-head": (b"BM" + bytes(30), "no image of a kind|damaged or cut short"),
    "tiff-head": (b"II*\x00\x08\x00\x00\x00\xff\xff", "no image of a kind|damaged or cut short"),
    "webp-head": (b"RIFF\x24\x00\x00\x00WEBPVP8 " + bytes(20), "no image of a kind|damaged or cut short"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_sound_image_is_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    content, expected = BAD[kind]
    path = tmp_path / f"{kind}.png"
    path.write_bytes(content)
    refused(path, expected)


def refused(path: Path, expected: str) -> None:
    with pytest.raises(RelpropError, match=expected) as caught:
        images.read(path)
    sentence = str(caught.value)
    assert str(path) in sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda _: None, "There is no image"),
        (Path.mkdir, "is a folder and no image"),
        (lambda path: path.symlink_to("nowhere"), "is a link to nothing"),
        (make_loop, "cannot be read"),
        (make_fifo, "is no regular file"),
        (make_socket, "is no regular file"),
        (lambda path: Image.new("F", (4, 4), 0.5).save(path, "TIFF"), "floating-point pixels"),
        (lambda path: Image.new("I", (4, 4), 70_000).save(path, "TIFF"), "32-bit pixels"),
        (lambda path: Image.new("I", (4, 4), -1).save(path, "TIFF"), "32-bit pixels"),
    ],
)
def test_what_is_no_image_file_is_refused(
    make: Callable[[Path], None], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name must be short
    path = Path("x.tif")
    make(path)
    refused(path, expected)


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / ("x" * 300 + ".png"), "cannot be read: File name too long")


def test_a_file_behind_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(jpeg())
    refused(tmp_path / "x.png" / "y.png", "cannot be read: Not a directory")


def test_what_may_not_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(jpeg())
    (tmp_path / "closed").mkdir()
    (tmp_path / "x.png").chmod(0)
    (tmp_path / "closed").chmod(0)
    if os.geteuid() != 0:
        refused(tmp_path / "x.png", "Permission denied")
        assert images.find([tmp_path / "closed"]) == [tmp_path / "closed"]
        refused(tmp_path / "closed", "may not be looked into")
        return
    # Root may read everything, so somebody else tries.
    tmp_path.chmod(0o755)
    script = """
import os
from relprop import images
os.setgid(65534)
os.setuid(65534)
for path in ["x.png", *images.find(["closed"])]:
    try:
        images.read(path)
    except images.RelpropError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "x.png cannot be read: Permission denied.",
        "closed is a folder that may not be looked into.",
    ]


# -- finding --


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "b.jpg",
        "a.PNG",
        "sub/c.webp",
        "sub/deep/d.tif",
        ".hidden.jpg",
        ".git/e.jpg",
        "notes.txt",
        "sub/f.jpg~",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def test_folders_are_searched_in_order_without_what_is_hidden(tree: Path) -> None:
    found = [str(path.relative_to(tree)) for path in images.find([tree])]
    assert found == ["a.PNG", "b.jpg", "sub/c.webp", "sub/deep/d.tif"]


def test_a_file_that_is_named_is_taken_whatever_it_is(tree: Path) -> None:
    named = [tree / "notes.txt", tree / ".hidden.jpg", tree / "missing.jpg"]
    assert images.find(named) == named


def test_a_file_is_found_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert images.find(["b.jpg", tree, "sub/../b.jpg"])[0] == Path("b.jpg")
    assert len(images.find(["b.jpg", tree, "sub/../b.jpg", tree / "sub"])) == 4


@pytest.mark.parametrize("made", ["relevance.npy", "maps.npz"])
def test_what_was_made_here_and_linked_folders_are_left_out(tree: Path, made: str) -> None:
    (tree / "sub/manifest.json").write_text("{}")
    (tree / "sub" / made).write_bytes(b"")
    (tree / "again").symlink_to(tree)
    assert [path.name for path in images.find([tree])] == ["a.PNG", "b.jpg", "d.tif"]


@pytest.mark.parametrize(
    ("paths", "expected"), [(["empty"], "no images in empty"), ([], "nowhere"), ([""], "empty name")]
)
def test_nothing_found_is_said(
    paths: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/notes.txt").touch()
    with pytest.raises(RelpropError, match=expected):
        images.find(paths)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["x/cat.jpg"], ["cat"]),
        (["x/cat.jpg", "x/dog.jpg"], ["cat", "dog"]),
        (["x/cat.jpg", "x/cat.png"], ["cat.jpg", "cat.png"]),
        (["x/cat.jpg", "y/cat.jpg", "dog.jpg"], ["x-cat", "y-cat", "dog"]),
        (["x/Cat.jpg", "y/cat.jpg"], ["x-Cat", "y-cat"]),
        (["x/a/cat.jpg", "y/a/cat.jpg"], ["x-a-cat", "y-a-cat"]),
        ([".x.jpg", "..jpg"], ["x", "image"]),
    ],
)
def test_names_are_as_short_as_tells_files_apart(paths: list[str], expected: list[str]) -> None:
    assert images.names([Path(path) for path in paths]) == expected


def test_names_are_always_distinct() -> None:
    paths = [
        Path(p) for p in ("/a-b/c.jpg", "/a/b-c.jpg", "/a/b/c.jpg", "/c.jpg", "/b/c.jpg", "/b-c.jpg", "/a-b-c.jpg")
    ]
    assert len(set(images.names(paths))) == len(paths)
