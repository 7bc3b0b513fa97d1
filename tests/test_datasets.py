"""Datasets: layouts that are recognised, balanced choices, loading ahead, and boxes that land where the image does."""

from __future__ import annotations

import csv
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from relprop import RelpropError, datasets
from relprop.datasets import Sample, batches, to_crop
from relprop.preparation import Preparation

SYNSETS = ["n01440764", "n01443537", "n01484850"]  # classes 0, 1 and 2


def picture(path: Path, size: tuple[int, int] = (20, 16), value: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path)
    return path


def table(path: Path, *rows: tuple[object, ...]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def labels(dataset: datasets.Dataset) -> dict[str, int | None]:
    return {sample.name: sample.label for sample in dataset}


ANNOTATION = """<annotation><size><width>20</width><height>16</height></size>
<object><name>n01440764</name><bndbox><xmin>2</xmin><ymin>3</ymin><xmax>9</xmax><ymax>7</ymax></bndbox></object>
<object><name>n01440764</name><bndbox><xmin>0</xmin><ymin>0</ymin><xmax>19</xmax><ymax>15</ymax></bndbox></object>
</annotation>"""


# -- ImageNet --


@pytest.mark.parametrize("inside", [".", "val"])
def test_synset_folders(inside: str, tmp_path: Path) -> None:
    for i, synset in enumerate([*SYNSETS, "n15075141"]):
        picture(tmp_path / inside / synset / f"ILSVRC2012_val_0000000{i}.JPEG")
    dataset = datasets.open(tmp_path)
    assert dataset.layout == "synset folders"
    assert [s.label for s in dataset] == [0, 1, 2, 999]
    assert dataset[3].name == "n15075141/ILSVRC2012_val_00000003.JPEG"
    (tmp_path / inside / "n99999999").mkdir()
    with pytest.raises(RelpropError, match="'n99999999', which is none of ImageNet's 1000 synsets"):
        datasets.open(tmp_path)


def test_index_folders_with_boxes_from_elsewhere(tmp_path: Path) -> None:
    for i in (0, 2, 10, 999):
        picture(tmp_path / "data" / str(i) / f"ILSVRC2012_val_{i:08}.JPEG")
    boxes = table(
        tmp_path / "boxes.csv",
        ("file", "x0", "y0", "x1", "y1"),
        ("ILSVRC2012_val_00000002.JPEG", 2, 3, 9, 7),
        ("ILSVRC2012_val_00000002.JPEG", 0, 0, 19, 15),
    )
    dataset = datasets.open(tmp_path / "data", boxes=boxes)
    assert dataset.layout == "folders named by class index"
    assert [s.label for s in dataset] == [0, 2, 10, 999]
    assert dataset[1].boxes == ((2, 3, 10, 8), (0, 0, 20, 16))
    assert dataset[0].boxes == ()
    assert "4 images, folders named by class index, 4 classes, 1 with boxes" in str(dataset)
    with pytest.raises(RelpropError, match="holds no boxes"):
        datasets.open(tmp_path / "data", boxes=table(tmp_path / "other.csv", ("file", "label"), ("a", 1)))
    with pytest.raises(RelpropError, match="are not there"):
        datasets.open(tmp_path / "data", boxes=tmp_path / "nowhere.csv")


@pytest.mark.parametrize(
    ("header", "values"),
    [
        (("file", "class_index", "synset"), lambda i: (f"{i}.png", i, SYNSETS[i])),
        (("image", "synset"), lambda i: (f"{i}.png", SYNSETS[i])),
        (("ImageId", "PredictionString"), lambda i: (f"{i}", f"{SYNSETS[i]} 2 3 9 7 {SYNSETS[i]} 0 0 19 15 ")),
    ],
)
@pytest.mark.parametrize("place", [".", "images", "ILSVRC/Data/CLS-LOC/val"])
def test_images_side_by_side_with_a_table(
    place: str, header: tuple[str, ...], values: Callable[[int], tuple[object, ...]], tmp_path: Path
) -> None:
    for i in range(3):
        picture(tmp_path / place / f"{i}.png")
    table(tmp_path / "labels.csv", header, *map(values, range(3)))
    dataset = datasets.open(tmp_path)
    assert dataset.layout == "images with classes in labels.csv"
    assert labels(dataset) == {"0.png": 0, "1.png": 1, "2.png": 2}
    if "PredictionString" in header:
        assert dataset[1].boxes == ((2, 3, 10, 8), (0, 0, 20, 16))
    picture(tmp_path / place / "stray.png")
    with pytest.raises(RelpropError, match=r"does not tell the class of 1 of the 4 images, such as stray\.png"):
        datasets.open(tmp_path)


def test_val_txt_and_xml_annotations(tmp_path: Path) -> None:
    for i in range(3):
        picture(tmp_path / "ILSVRC/Data/CLS-LOC/val" / f"ILSVRC2012_val_0000000{i}.JPEG")
    (tmp_path / "val.txt").write_text("".join(f"ILSVRC2012_val_0000000{i}.JPEG {i + 7}\n" for i in range(3)))
    annotations = tmp_path / "ILSVRC/Annotations/CLS-LOC/val"
    annotations.mkdir(parents=True)
    (annotations / "ILSVRC2012_val_00000001.xml").write_text(ANNOTATION)
    (annotations / "ILSVRC2012_val_00000002.xml").write_text("<annotation>")
    dataset = datasets.open(tmp_path)
    assert [s.label for s in dataset] == [7, 8, 9]
    assert dataset[0].boxes == ()
    assert dataset[1].boxes == ((2, 3, 10, 8), (0, 0, 20, 16))
    with pytest.raises(RelpropError, match=r"annotation .*00000002\.xml cannot be read"):
        _ = dataset[2].boxes


def test_the_development_kit_numbers_classes_in_its_own_order(tmp_path: Path) -> None:
    from scipy import io

    for i in (1, 3):
        picture(tmp_path / "val" / f"ILSVRC2012_val_{i:08}.JPEG")
    kit = tmp_path / "ILSVRC2012_devkit_t12" / "data"
    kit.mkdir(parents=True)
    (kit / "ILSVRC2012_validation_ground_truth.txt").write_text("2\n1\n3\n")
    rows = [(1, SYNSETS[2]), (2, SYNSETS[0]), (3, SYNSETS[1])]
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O")]
    io.savemat(kit / "meta.mat", {"synsets": np.array([(*row, "words") for row in rows], dtype=kind)})
    dataset = datasets.open(tmp_path)
    assert labels(dataset) == {"ILSVRC2012_val_00000001.JPEG": 0, "ILSVRC2012_val_00000003.JPEG": 1}
    assert "development kit" in dataset.layout
    picture(tmp_path / "val" / "ILSVRC2012_val_00000004.JPEG")
    with pytest.raises(RelpropError, match="a number up to 3"):
        datasets.open(tmp_path)
    (kit / "meta.mat").unlink()
    with pytest.raises(RelpropError, match=r"development kit in .* cannot be read"):
        datasets.open(tmp_path)


def test_the_sample_of_imagenet(data_dir: Path) -> None:
    dataset = datasets.open(data_dir / "imagenet-val-200")
    assert len(dataset) == 200
    assert sorted(s.label for s in dataset if s.label is not None) == list(range(0, 1000, 5))
    assert all(s.boxes for s in dataset)
    regions = [s.objects() for s in list(dataset)[:20]]
    assert all(r is not None and r.shape == (224, 224) and r.any() for r in regions)
    more = datasets.open(data_dir / "imagenet-val-200", boxes=data_dir / "imagenet-val5000-boxes.csv")
    assert [s.boxes for s in more] == [s.boxes for s in dataset]


# -- CUB --


def birds(root: Path) -> None:
    for i, folder in ((1, "001.Albatross"), (2, "001.Albatross"), (5, "002.Ani")):
        picture(root / "images" / folder / f"{i}.jpg", (40, 30))
        mask = np.zeros((30, 40), np.uint8)
        mask[10:20, 5:15] = 204
        mask[20:22, 5:15] = 102  # two of five people
        path = root / "segmentations" / folder / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(path)
    (root / "images.txt").write_text("1 001.Albatross/1.jpg\n2 001.Albatross/2.jpg\n5 002.Ani/5.jpg\n")
    (root / "image_class_labels.txt").write_text("1 1\n2 1\n5 2\n")
    (root / "classes.txt").write_text("1 001.Albatross\n2 002.Ani\n")
    (root / "train_test_split.txt").write_text("1 1\n2 0\n5 0\n")
    (root / "bounding_boxes.txt").write_text("1 1.0 2.0 3.0 4.0\n2 5.0 10.0 10.0 10.0\n5 0.0 0.0 40.0 30.0\n")
    (root / "parts").mkdir()
    (root / "parts" / "parts.txt").write_text("1 back\n2 left eye\n")
    (root / "parts" / "part_locs.txt").write_text("2 1 7.0 11.0 1\n2 2 0.0 0.0 0\n5 2 3.0 4.0 1\n")


@pytest.mark.parametrize("inside", [".", "CUB_200_2011"])
def test_birds(inside: str, tmp_path: Path) -> None:
    birds(tmp_path / inside)
    dataset = datasets.open(tmp_path)
    assert dataset.layout == "CUB-200-2011, the official test split"
    assert labels(dataset) == {"001.Albatross/2.jpg": 0, "002.Ani/5.jpg": 1}
    assert dataset.classes == ("001.Albatross", "002.Ani")
    assert dataset[0].boxes == ((5, 10, 15, 20),)
    assert dataset[0].parts == {"back": (7.0, 11.0)}
    assert dataset[1].parts == {"left eye": (3.0, 4.0)}
    mask = dataset[0].mask()
    assert mask is not None
    assert mask.nonzero().amin(0).tolist() == [10, 5]
    assert mask.nonzero().amax(0).tolist() == [19, 14]
    assert len(datasets.open(tmp_path, split="train")) == 1
    assert len(datasets.open(tmp_path, split="all")) == 3
    with pytest.raises(RelpropError, match="no split 'val'; there are test, train, all"):
        datasets.open(tmp_path, split="val")
    (tmp_path / inside / "image_class_labels.txt").write_text("1 1\n2 1\n")
    with pytest.raises(RelpropError, match="does not tell the class of image 5"):
        datasets.open(tmp_path)


def test_the_sample_of_birds(data_dir: Path) -> None:
    dataset = datasets.open(data_dir / "cub-200-sample")
    assert [s.label for s in dataset] == list(range(200))
    assert dataset.classes is not None
    assert len(dataset.classes) == 200
    for sample in list(dataset)[:20]:
        mask, ((x0, y0, x1, y1),) = sample.mask(), sample.boxes
        assert mask is not None
        inside = mask[int(y0) : int(y1) + 1, int(x0) : int(x1) + 1].sum() / mask.sum()
        assert inside > 0.9  # the boxes were drawn around what the masks show


# -- folders --


def test_one_folder_a_class(tmp_path: Path) -> None:
    for name in ("zebra/b.png", "zebra/deep/a.jpg", "ant/c.webp", "ant/notes.txt", ".hidden/d.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("words") if path.suffix == ".txt" else picture(path)
    dataset = datasets.open(tmp_path)
    assert dataset.classes == ("ant", "zebra")
    assert labels(dataset) == {"ant/c.webp": 0, "zebra/b.png": 1, "zebra/deep/a.jpg": 1}
    assert dataset.layout == "one folder a class, the 2 by name"


def test_images_without_classes(tmp_path: Path) -> None:
    picture(tmp_path / "b.png")
    picture(tmp_path / "a.JPG")
    dataset = datasets.open(tmp_path)
    assert labels(dataset) == {"a.JPG": None, "b.png": None}
    assert batch_of(dataset).labels.tolist() == [-1, -1]
    assert dataset[0].objects() is None


def test_the_sample_of_pets_with_trimaps(data_dir: Path) -> None:
    dataset = datasets.open(data_dir / "pets-100-sample")
    assert len(dataset) == 100
    assert sorted(Counter(s.label for s in dataset).values()) == [4] * 25
    sample = next(s for s in dataset if s.name == "pug_2.jpg")
    mask, region = sample.mask(), sample.objects()
    assert mask is not None
    assert region is not None
    with Image.open(data_dir / "pets-100-sample/trimaps/pug_2.png") as trimap:
        assert np.array_equal(mask.numpy(), np.array(trimap) == 1)
    assert 0.05 < float(region.float().mean()) < 0.95


def test_what_is_no_dataset_is_refused_with_the_layouts(tmp_path: Path) -> None:
    with pytest.raises(RelpropError, match=r"holds no dataset that relprop reads: ImageNet's synset folders .* CSV"):
        datasets.open(tmp_path)
    with pytest.raises(RelpropError, match="is not there; relprop reads"):
        datasets.open(tmp_path / "nowhere")
    with pytest.raises(RelpropError, match="is a file, not a folder"):
        datasets.open(picture(tmp_path / "a.png"))


# -- choosing --


def many(tmp_path: Path, per_class: int = 6, classes: int = 4) -> datasets.Dataset:
    samples = [Sample(tmp_path / f"{c}-{i}.png", c, f"{c}-{i}.png") for c in range(classes) for i in range(per_class)]
    return datasets.Dataset("many", tmp_path, "made up", tuple(samples))


def test_a_sample_is_balanced_and_seeded(tmp_path: Path) -> None:
    dataset = many(tmp_path)
    chosen = dataset.sample(2)
    assert Counter(s.label for s in chosen) == dict.fromkeys(range(4), 2)
    assert [s.name for s in chosen] == [s.name for s in dataset if s in chosen.samples]
    assert chosen.samples == dataset.sample(2).samples
    assert chosen.samples != dataset.sample(2, seed=1).samples
    assert set(chosen.samples) < set(dataset.sample(3).samples)
    fewer = datasets.Dataset("fewer", tmp_path, "made up", tuple(s for s in dataset if s.label != 2))
    assert [s for s in chosen if s.label != 2] == list(fewer.sample(2))  # the others' turns stay as they were
    for n in (0, 7):
        with pytest.raises(RelpropError, match=rf"cannot give {n} images of every class: class 0 has 6"):
            dataset.sample(n)


def test_a_limit_is_spread_over_the_classes(tmp_path: Path) -> None:
    dataset = many(tmp_path)
    assert sorted(Counter(s.label for s in dataset.limit(10)).values()) == [2, 2, 3, 3]
    assert set(dataset.limit(8)) == set(dataset.sample(2))
    assert len(dataset.limit(3)) == 3
    assert dataset.limit(1000).samples == dataset.samples
    with pytest.raises(RelpropError, match="limited to 0"):
        dataset.limit(0)


def test_a_key_is_the_hash_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"abc")
    sample = Sample(path, None, "a")
    path_read = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sample.key == path_read
    path.unlink()
    assert sample.key == path_read
    with pytest.raises(RelpropError, match="cannot be read"):
        _ = Sample(path, None, "a").key


# -- loading --


def batch_of(dataset: datasets.Dataset) -> datasets.Batch:
    return next(batches(dataset, lambda path: torch.tensor([float(len(path.name))]), len(dataset)))


def test_batches_come_in_order_and_are_decoded_ahead_but_not_all_at_once(tmp_path: Path) -> None:
    dataset = many(tmp_path)
    started: list[Path] = []
    main = threading.get_ident()

    def prepare(path: Path) -> Tensor:
        assert threading.get_ident() != main
        started.append(path)
        return torch.full((3, 4, 4), float(path.stem.replace("-", "")))

    loader = batches(dataset, prepare, 5, ahead=1)
    first = next(loader)
    assert first.x.shape == (5, 3, 4, 4)
    assert len(started) <= 10  # the one that was asked for, and one ahead
    rest = list(loader)
    assert [len(b.samples) for b in rest] == [5, 5, 5, 4]
    assert [s for b in [first, *rest] for s in b.samples] == list(dataset)
    values = torch.cat([b.x[:, 0, 0, 0] for b in [first, *rest]])
    assert values.tolist() == [float(s.path.stem.replace("-", "")) for s in dataset]
    assert torch.cat([b.labels for b in [first, *rest]]).tolist() == [s.label for s in dataset]
    with pytest.raises(RelpropError, match="size must be at least 1"):
        batches(dataset, prepare, 0)


def test_loading_stops_when_nobody_asks_and_a_bad_image_is_named(tmp_path: Path) -> None:
    def waiting() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("relprop-decode")]

    dataset = many(tmp_path)
    loader = batches(dataset, lambda _: torch.zeros(1), 2)
    next(loader)
    loader.close()  # type: ignore[attr-defined] # an iterator by type, a generator in fact
    for thread in [t for t in threading.enumerate() if t.name.startswith("relprop-decode")]:
        thread.join(5)
    assert not waiting()
    with pytest.raises(RelpropError, match=r"no image .*0-0\.png"):
        next(batches(dataset, lambda path: Preparation().normalised(Preparation().cropped(path)), 2))


# -- geometry --


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (256, 256), (301, 223), (1000, 260), (100, 90)])
@pytest.mark.parametrize("preparation", [Preparation(), Preparation(64, 64), Preparation(232, 200, "bicubic")])
def test_boxes_land_where_their_pixels_do(size: tuple[int, int], preparation: Preparation) -> None:
    width, height = size
    box = (0.4 * width // 1, 0.3 * height // 1, 0.7 * width // 1, 0.8 * height // 1)
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[int(box[1]) : int(box[3]), int(box[0]) : int(box[2])] = True
    drawn = Image.fromarray(mask.numpy().astype(np.uint8) * 255)
    seen = np.array(preparation.cropped(drawn))[..., 0] > 127
    assert np.array_equal(to_crop(mask, size, preparation).numpy(), seen)
    rows, columns = seen.any(1).nonzero()[0], seen.any(0).nonzero()[0]
    actual = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    (moved,) = to_crop(torch.tensor([box]), size, preparation).tolist()
    assert np.abs(np.array(moved) - actual).max() <= 1.0
    assert not len(to_crop(torch.tensor([[-9.0, 0.0, -1.0, 5.0]]), size, preparation))
    whole = to_crop(torch.tensor([[0.0, 0.0, width, height]]), size, preparation)
    assert whole.tolist() == [[0, 0, preparation.crop, preparation.crop]]


@pytest.mark.parametrize("orientation", [0, 1, 2, 3, 4, 5, 6, 7, 8])
def test_annotations_turn_with_the_image(orientation: int, tmp_path: Path) -> None:
    pixels = np.zeros((90, 120, 3), np.uint8)
    pixels[10:50, 70:110] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    Image.fromarray(pixels[..., 0]).save(tmp_path / "mask.png")
    preparation = Preparation(90, 80)
    seen = np.array(preparation.cropped(tmp_path / "a.png"))[..., 0] > 127
    masked = Sample(tmp_path / "a.png", 0, "a", mask_path=tmp_path / "mask.png").objects(preparation)
    boxed = Sample(tmp_path / "a.png", 0, "a", ((70, 10, 110, 50),)).objects(preparation)
    assert masked is not None
    assert boxed is not None
    assert np.array_equal(masked.numpy(), seen)
    assert np.array_equal(boxed.numpy(), seen)


def test_a_mask_of_another_size_is_refused(tmp_path: Path) -> None:
    sample = Sample(picture(tmp_path / "a.png"), 0, "a", mask_path=picture(tmp_path / "b.png", (10, 10)))
    with pytest.raises(RelpropError, match=r"b\.png is 10 x 10, but a\.png is 20 x 16"):
        sample.objects()
    (tmp_path / "b.png").write_text("no image")
    with pytest.raises(RelpropError, match=r"mask .*b\.png cannot be read"):
        sample.mask()
