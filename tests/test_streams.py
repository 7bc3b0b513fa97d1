"""Streams: images by path, by URL and in WebDataset shards, as many as there may be."""

import io
import shutil
import tarfile
import tracemalloc
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tiny
from server import Server

from relprop import RelpropError, datasets, zoo
from relprop.datasets import Place, streams
from relprop.study import Progress, evaluate, read
from relprop.study.local import Local
from relprop.study.log import Log
from relprop.study.pieces import Batch
from relprop.study.runner import Runner

ASKED: dict[str, Any] = {"methods": ["random", "paper"], "metrics": ["sparseness"], "batch_size": 3}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.photos(tmp_path_factory.mktemp("photos") / "some", 8)


@pytest.fixture(scope="module")
def model() -> zoo.Model:
    return tiny.model()


def shard(path: Path, files: Iterable[Path], *, classes: bool = True) -> None:
    with tarfile.open(path, "w") as tar:
        for number, file in enumerate(files):
            parts = {file.name: file.read_bytes(), f"{file.stem}.json": b"{}"}
            parts |= {f"{file.stem}.cls": str(int(file.stem) % 10).encode()} if classes else {}
            for name, content in parts.items():
                info = tarfile.TarInfo(name if number % 2 else f"./{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def test_wherever_images_lie_their_rows_are_the_same(
    model: zoo.Model, photos: Path, tmp_path: Path, server: Server
) -> None:
    files = sorted(photos.glob("*.png"))
    expected = [(row.key, row.label, row.values) for row in evaluate(model, photos, **ASKED).rows]
    lines = [f"{file}\t{int(file.stem) % 10}" for file in files]
    (tmp_path / "all.txt").write_text("\n".join([*lines[:4], "", *lines[4:]]) + "\n")
    rows = [f"some/{file.name},{int(file.stem) % 10}" for file in files]
    (tmp_path / "some").symlink_to(photos)
    (tmp_path / "all.csv").write_text("\n".join(["file,class_index", *rows]) + "\n")
    for number in range(2):
        shard(tmp_path / f"s-{number:03d}.tar", files[number * 4 : number * 4 + 4])
    server.files |= {f"/{file.name}": file.read_bytes() for file in files}
    far = [f"{server.address}/{file.name},{int(file.stem) % 10}" for file in files]
    (tmp_path / "far.csv").write_text("\n".join(["image,label", *far]) + "\n")
    for data, count in (("all.txt", 8), ("all.csv", 8), ("s-{000..001}.tar", None), ("far.csv", 8)):
        found = streams.read(str(tmp_path / data))
        assert found is not None
        assert found.count == count
        study = evaluate(model, tmp_path / data, **ASKED)
        assert not study.failures
        assert sorted((row.key, row.label) for row in study.rows) == sorted(e[:2] for e in expected)
        values = {row.key: row.values for row in study.rows}
        assert all(values[key] == numbers for key, _, numbers in expected)
    few = evaluate(model, tmp_path / "s-{000..001}.tar", limit=3, **ASKED)
    assert len({row.image for row in few.rows}) == 3
    asked = [path for path in server.asked if path == "/00.png"]
    assert len(asked) == 1  # fetched once, for its key and its pixels


def test_names_that_are_not_unique_mix_no_images(model: zoo.Model, photos: Path, tmp_path: Path) -> None:
    expected = {
        row.image: row.values["sparseness"] for row in evaluate(model, photos, **ASKED).rows if row.method == "paper"
    }
    (tmp_path / "twice.txt").write_text("".join(f"{photos}/{i:02d}.png\t{i}\n" for i in (0, 0, 1, 2)))
    study = evaluate(model, tmp_path / "twice.txt", **ASKED)
    assert not study.failures
    found = {Path(row.image).name: row.values["sparseness"] for row in study.rows if row.method == "paper"}
    assert found == pytest.approx({f"{i:02d}.png": expected[f"{i:02d}.png"] for i in range(3)}, rel=1e-6)
    (tmp_path / "two.txt").write_text(f"{photos}/00.png\t0\n{photos}/00.png\t1\n")
    study = evaluate(model, tmp_path / "two.txt", **ASKED)
    assert [*study.failures.values()] == ["Another image of its batch has the same name, and is measured."]
    assert {row.label for row in study.rows} == {0}


def test_shards_are_told_apart_by_their_folders(photos: Path, tmp_path: Path) -> None:
    for number, file in enumerate(sorted(photos.glob("*.png"))[:2]):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / "x.png").write_bytes(file.read_bytes())
        shard(tmp_path / f"{number}" / "val.tar", [tmp_path / "x.png"], classes=False)
    found = streams.read(str(tmp_path / "{0..1}" / "val.tar"))
    assert found is not None
    assert [sample.name for sample in found] == ["0/val/./x.png", "1/val/./x.png"]


def test_of_the_members_of_one_name_the_plain_one_is_the_image(tmp_path: Path) -> None:
    def packed(*names: str) -> list[str]:
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            for name in names:
                tar.addfile(tarfile.TarInfo(name))
        found = streams.read(str(tmp_path / "a.tar"))
        assert found is not None
        return [sample.name for sample in found]

    assert packed("0.seg.png", "0.jpg", "0.mask.png", "1.v2.jpg") == ["a/0.jpg", "a/1.v2.jpg"]
    with pytest.raises(RelpropError, match="of which one has to be the image"):
        packed("photo.1.jpg", "photo.2.jpg")


def test_a_million_entries_begin_at_once(model: zoo.Model, photos: Path, tmp_path: Path) -> None:
    listing = tmp_path / "million.txt"
    with listing.open("w") as file:
        file.writelines(f"{photos}/{i:02d}.png\t{i}\n" for i in range(6))
        file.writelines(f"/not/there/{i:07d}.jpg\t{i % 1000}\n" for i in range(6, 1_000_000))

    class Beginning(Local):
        def __call__(self, run: Runner, batches: Iterable[Batch], log: Log) -> None:
            super().__call__(run, islice(batches, 2), log)

    tracemalloc.start()
    study = evaluate(model, listing, out=tmp_path / "out", engine=Beginning(), **ASKED)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert study.manifest["images"] == 1_000_000
    assert len({row.image for row in study.rows}) == 6
    assert not study.failures  # nobody has looked for the others
    assert peak < 40e6  # nor are they held


def test_what_cannot_be_read_gets_a_sentence(model: zoo.Model, tmp_path: Path, server: Server) -> None:
    (tmp_path / "a.txt").write_text(f"{server.address}/nothing.png\n{server.address}/cut\n")
    study = evaluate(model, tmp_path / "a.txt", **ASKED)
    assert not study.rows
    assert len(study.failures) == 2
    assert server.asked.count("/nothing.png") == 2  # two tries
    (tmp_path / "b.csv").write_text("what,label\nx.png,1\n")
    (tmp_path / "c.txt").write_text("x.png\ttabby\n")
    (tmp_path / "latin.txt").write_bytes("Käse.png\n".encode("latin-1"))
    (tmp_path / "short.csv").write_text("label,file\n1\n")
    (tmp_path / "d.tar").write_bytes(b"no tar file" * 100)
    for name, words in (
        ("b.csv", "lists no images"),
        ("c.txt", "The class 'tabby' in line 1 of .* is no number"),
        ("latin.txt", "latin.txt cannot be read: 'utf-8' codec"),
        ("short.csv", "There is no image in line 2 of .*short.csv"),
        ("d.tar", "The shard .* cannot be read"),
        ("e.tar", "e.tar cannot be read: No such file"),
        ("f.txt", "f.txt is not there; relprop reads"),
    ):
        with pytest.raises(RelpropError, match=words):
            evaluate(model, tmp_path / name, **ASKED)
    (tmp_path / "short").write_bytes(b"abcd")
    with pytest.raises(RelpropError, match="there are 3 bytes of 9"):
        Place(str(tmp_path / "short"), 1, 9).read()
    with pytest.raises(RelpropError, match="nowhere://x cannot be reached"):
        Place("nowhere://x").read()


def test_rows_go_to_any_url(model: zoo.Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELPROP_CACHE", str(tmp_path))
    monkeypatch.setattr("relprop.study.parts.ROWS", 4)
    url = "memory://bucket/study"
    study = evaluate(model, photos, out=url, **ASKED)
    assert tuple(read(url)) == study.rows == evaluate(model, photos, **ASKED).rows
    files, folder = datasets.place.filesystem(url)
    names = {path.rpartition("/")[2] for path in files.ls(f"{folder}/rows", detail=False)}
    assert len(names) > 1
    assert b'"finished"' in files.cat_file(f"{folder}/manifest.json")
    # A part that was not written before the end is written by the next run, under its name.
    lost = max(names)
    content = files.cat_file(f"{folder}/rows/{lost}")
    files.rm(f"{folder}/rows/{lost}")
    assert evaluate(model, photos, out=url, **ASKED).rows == study.rows
    assert files.cat_file(f"{folder}/rows/{lost}") == content
    with pytest.raises(RelpropError, match="memory://nothing holds no study"):
        read("memory://nothing")


def test_rows_that_are_computed_again_are_in_one_part(
    model: zoo.Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that could not be read can be: the others of its batch are its company once more, and nothing else."""
    monkeypatch.setenv("RELPROP_CACHE", str(tmp_path / "cache"))
    some = Path(shutil.copytree(photos, tmp_path / "some"))
    content = (some / "07.png").read_bytes()
    (some / "07.png").write_bytes(b"no image")
    url = f"file://{tmp_path}/study"
    assert len(evaluate(model, some, out=url, **ASKED).rows) == 14
    (some / "07.png").write_bytes(content)
    told: list[Progress] = []
    study = evaluate(model, some, out=url, progress=told.append, **ASKED)
    assert len(study.rows) == 16
    assert {mean.n for mean in told[-1].means.values()} == {8}
    every = pq.read_table(tmp_path / "study" / "rows")
    assert sorted(every["key"].to_pylist()) == sorted(row.key for row in study.rows)
    # Whichever part comes first, its columns are not all that the folder has.
    for metric in ("class-sensitivity", "conservation-error"):
        evaluate(model, some, ["paper"], [metric], out=url)
        every = pq.read_table(tmp_path / "study" / "rows")
        assert every.num_rows - every[metric].null_count == 8
    assert [row.curves for row in read(url, curves=False)] == [{}] * every.num_rows
