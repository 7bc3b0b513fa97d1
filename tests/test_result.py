import hashlib
import json
import math
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from relprop.errors import RelpropError
from relprop.heatmap import colorize, heat_quantization, overlay
from relprop.ledger import Ledger
from relprop.result import Explanation

# The spatial axes of inputs that are lists of features, signals, images and volumes; features have no channels.
INPUTS = [(7,), (3, 11), (3, 6, 5), (2, 4, 3, 5)]


def make_ledger(batch):
    """The account of a net with one linear map that gives a quarter to its bias and loses a thousandth."""
    start = torch.ones(*batch, dtype=torch.float64).reshape(batch[0], -1).T
    scale = start * torch.linspace(0.1, 0.9, batch[0], dtype=torch.float64)
    ledger = Ledger(
        nodes=("x", "fc", "output"),
        modules={("fc", 0): frozenset({1}), ("", 0): frozenset({0, 1, 2})},
        start=start,
        scale=scale,
        several=len(batch) == 2,
        tolerance=1e-5,
    )
    ledger.record(2, 1, start, start)
    ledger.record(1, 0, start * 0.749, start * 0.749)
    ledger.absorbed[1] = {"bias": start * 0.25}
    return ledger


def make(inputs=(3, 6, 5), batch=(2,), dtype=torch.float32, layers=(), seed=0, **settings):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(shape, generator=generator).to(dtype) for shape in ((*batch, *inputs), batch, (batch[0], 10))]
    relevance, start, output = draw
    return Explanation(
        relevance=relevance,
        target=torch.randint(10, batch, generator=generator),
        start=start,
        output=output,
        ledger=make_ledger(batch),
        layers={key: torch.randn(*batch, 4, 2, 2, generator=generator).to(dtype) for key in layers},
        settings={"preset": "paper", **settings},
    )


def same(a, b):
    """Equal bit for bit, dtype and shape included."""
    bits = [t.contiguous().flatten().view(torch.uint8).tolist() for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and bits[0] == bits[1]


def assert_same(a, b):
    for name in ("relevance", "target", "start", "output"):
        assert same(getattr(a, name), getattr(b, name)), name
    assert list(a.layers) == list(b.layers)
    assert all(same(a.layers[key], b.layers[key]) for key in a.layers)
    assert a.settings == b.settings
    assert a.ledger.to_dict() == b.ledger.to_dict()
    assert same(a.ledger.error, b.ledger.error)


def pixels(path):
    with Image.open(path) as png:
        return np.asarray(png)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class TestHeatmap:
    def test_by_hand(self):
        e = make()
        channels = e.relevance.unbind(1)
        torch.testing.assert_close(e.heatmap, channels[0] + channels[1] + channels[2])

    @pytest.mark.parametrize("inputs", INPUTS)
    @pytest.mark.parametrize("batch", [(2,), (2, 3)])
    def test_sums_the_channels_and_nothing_else(self, inputs, batch):
        e = make(inputs, batch, torch.float64)
        spatial = inputs[1:] if len(inputs) > 1 else inputs
        assert e.heatmap.shape == (*batch, *spatial)
        torch.testing.assert_close(e.heatmap.flatten(len(batch)).sum(-1), e.relevance.flatten(len(batch)).sum(-1))

    def test_features_stay_as_they_are(self):
        e = make((7,))
        assert same(e.heatmap, e.relevance)

    @pytest.mark.parametrize("edges", ["paper", "released"])
    @pytest.mark.parametrize("inputs", INPUTS)
    @pytest.mark.parametrize("batch", [(2,), (2, 3)])
    def test_quantized_is_each_map_on_its_own(self, inputs, batch, edges):
        e = make(inputs, batch)
        quantized = e.quantized(5, edges)
        for index in np.ndindex(*batch):
            one = e.heatmap[index]
            assert same(quantized[index], heat_quantization(one, 5, edges, dims=one.dim()))


class TestExplanation:
    def test_is_frozen(self):
        with pytest.raises(AttributeError):
            make().relevance = torch.zeros(1)

    @pytest.mark.parametrize("field", ["relevance", "target", "start", "output"])
    def test_refuses_shapes_that_do_not_fit(self, field):
        good = make()
        values = {name: getattr(good, name) for name in ("relevance", "target", "start", "output", "ledger")}
        values[field] = values[field][:1]
        with pytest.raises(RelpropError, match=r"\(2,"):
            Explanation(**values)

    def test_repr_is_short_and_says_what_there_is(self):
        text = repr(make((3, 224, 224), layers=[("layer1.0", 0), ("relu", 2)]))
        assert len(text) < 300
        assert "(2, 3, 224, 224)" in text
        assert "'layer1.0', 'relu' call 2" in text
        assert "error 1.0e-03" in text

    def test_relevance_at(self):
        e = make(layers=[("relu", 0), ("relu", 1)])
        assert e.relevance_at("relu") is e.layers["relu", 0]
        assert e.relevance_at("relu", call=1) is e.layers["relu", 1]

    @pytest.mark.parametrize(
        ("kept", "asked", "words"),
        [
            ([("layer1", 0), ("relu", 1)], ("layer4.2", 0), r"'layer4\.2'.*'layer1', 'relu' call 1.*\[\"layer4\.2\"\]"),
            ([("relu", 0)], ("relu", 3), "'relu' call 3.*kept: 'relu'"),
            ([], ("fc", 0), "kept: none"),
        ],
    )
    def test_relevance_that_was_not_kept(self, kept, asked, words):
        with pytest.raises(RelpropError, match=words):
            make(layers=kept).relevance_at(*asked)


class TestSave:
    ARRAYS = ("output.npy", "relevance.npy", "start.npy", "target.npy")

    def test_files_of_one_target(self, tmp_path):
        e = make(layers=[("layer1.0", 0)])
        images = [Image.new("RGB", (9, 9), colour) for colour in ("red", "green")]
        written = e.save(tmp_path / "out", images)
        pictures = [f"{n}.png" for i in "01" for n in (f"heatmap-00{i}", f"heatmap-00{i}-quantized", f"overlay-00{i}")]
        expected = sorted([*self.ARRAYS, *pictures, "layer-000-layer1.0.npy", "manifest.json"])
        assert sorted(path.name for path in written) == expected == names(tmp_path / "out")
        assert written[-1].name == "manifest.json"
        assert all(path.parent == tmp_path / "out" for path in written)
        assert names(tmp_path) == ["out"]
        for i in range(2):
            folder = tmp_path / "out"
            assert (pixels(folder / f"heatmap-00{i}.png") == colorize(e.heatmap[i])).all()
            assert (pixels(folder / f"heatmap-00{i}-quantized.png") == colorize(e.quantized()[i])).all()
            assert (pixels(folder / f"overlay-00{i}.png") == overlay(e.heatmap[i], images[i])).all()

    def test_files_of_several_targets(self, tmp_path):
        e = make(batch=(2, 3))
        e.save(tmp_path, torch.rand(2, 3, 6, 5, generator=torch.Generator().manual_seed(0)), quantize=False)
        pictures = [f"{n}-00{i}-t0{t}.png" for i in range(2) for t in range(3) for n in ("heatmap", "overlay")]
        assert names(tmp_path) == sorted([*self.ARRAYS, *pictures, "manifest.json"])
        for i, t in np.ndindex(2, 3):
            assert (pixels(tmp_path / f"heatmap-00{i}-t0{t}.png") == colorize(e.heatmap[i, t])).all()

    def test_inputs_whose_names_differ_in_what_is_replaced(self, tmp_path):
        one = make()
        several = replace(one, relevance={"a b": one.relevance, "a_b": 2 * one.relevance})
        for _ in range(2):  # the second save takes the first one's place
            several.save(tmp_path)
            loaded = Explanation.load(tmp_path).relevance
            assert all(same(loaded[name], several.relevance[name]) for name in ("a b", "a_b"))

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(RelpropError, match="cannot be made"):
            make().save(tmp_path / "file" / "below" / "it")

    @pytest.mark.parametrize(("inputs", "pictures"), [((7,), 2), ((3, 11), 2), ((2, 4, 3, 5), 0)])
    def test_lines_are_strips_and_volumes_have_no_picture(self, tmp_path, inputs, pictures):
        e = make(inputs, batch=(1,))
        e.save(tmp_path)
        found = sorted(tmp_path.glob("*.png"))
        assert len(found) == pictures
        assert all(pixels(path).shape[1] == e.heatmap.shape[1] for path in found)
        assert_same(Explanation.load(tmp_path), e)

    def test_colour_bar(self, tmp_path):
        make().save(tmp_path / "plain")
        make().save(tmp_path / "bar", colorbar=True)
        for name in ("heatmap-000.png", "heatmap-000-quantized.png"):
            assert pixels(tmp_path / "bar" / name).shape[1] > pixels(tmp_path / "plain" / name).shape[1]

    def test_arrays_are_plain_numpy(self, tmp_path):
        e = make()
        e.save(tmp_path)
        for name in ("relevance", "target", "start", "output"):
            array = np.load(tmp_path / f"{name}.npy", allow_pickle=False)
            assert same(torch.from_numpy(array), getattr(e, name))

    def test_manifest(self, tmp_path):
        e = make(layers=[("layer1.0", 0)], split="ratio", levels=[8, None, True, 0.1])
        e.save(tmp_path)
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        assert manifest["version"] == 1
        assert manifest["torch"] == torch.__version__
        assert manifest["relprop"]
        assert manifest["settings"] == {"preset": "paper", "split": "ratio", "levels": [8, None, True, 0.1]}
        assert manifest["ledger"] == e.ledger.to_dict()
        shapes = {entry["file"]: entry["shape"] for entry in manifest["arrays"]}
        assert shapes["relevance.npy"] == [2, 3, 6, 5]
        assert shapes["layer-000-layer1.0.npy"] == [2, 4, 2, 2]
        assert sorted(manifest["files"]) == [name for name in names(tmp_path) if name != "manifest.json"]
        for name, digest in manifest["files"].items():
            assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest

    def test_again_replaces_the_earlier_save_and_nothing_else(self, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "heatmap-077.png").write_text("mine too")
        make(batch=(4,), layers=[("layer1", 0)], seed=1).save(tmp_path)
        second = make(batch=(1,), seed=2)
        written = second.save(tmp_path)
        assert names(tmp_path) == sorted([*(path.name for path in written), "notes.txt", "heatmap-077.png"])
        assert (tmp_path / "notes.txt").read_text() == "mine"
        assert (tmp_path / "heatmap-077.png").read_text() == "mine too"
        assert_same(Explanation.load(tmp_path), second)

    def test_a_manifest_has_no_say_outside_its_folder(self, tmp_path):
        (tmp_path / "outside.txt").write_text("mine")
        make().save(tmp_path / "out")
        manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
        manifest["files"]["../outside.txt"] = "0" * 64
        (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
        make().save(tmp_path / "out")
        assert (tmp_path / "outside.txt").read_text() == "mine"

    @pytest.mark.parametrize("foreign", ["{}", "no json", "[]", '{"format": "relprop.explanation", "version": 1}'])
    def test_over_a_foreign_manifest(self, tmp_path, foreign):
        (tmp_path / "manifest.json").write_text(foreign)
        e = make()
        e.save(tmp_path)
        assert_same(Explanation.load(tmp_path), e)

    def failures(self):
        """Saves that fail early, while painting, while writing the manifest, and while moving in."""
        good = Image.new("RGB", (5, 5))
        poisoned = make()
        poisoned.relevance[1, 0, 0, 0] = math.nan
        return [
            (make(batch=(3,), seed=3), {"images": [good]}, None),
            (make(batch=(3,), seed=3), {"images": [good, good, "photo.jpg"]}, None),
            (make((2, 4, 3, 5)), {"images": [good, good]}, None),
            (poisoned, {}, None),
            (make(batch=(3,), seed=3, split=lambda: 0), {}, None),
            (make(batch=(3,), seed=3, scale=math.inf), {}, None),
            (make(batch=(3,), seed=3), {}, "heatmap-002-quantized.png"),
        ]

    @pytest.mark.parametrize("case", range(7))
    def test_a_failure_leaves_an_earlier_save_as_it_was(self, tmp_path, case):
        broken, arguments, in_the_way = self.failures()[case]
        folder = tmp_path / "out"
        first = make(seed=9)
        first.save(folder)
        (folder / "notes.txt").write_text("mine")
        if in_the_way:
            (folder / in_the_way).mkdir()
        before, listed = contents(folder), names(folder)
        with pytest.raises(OSError if in_the_way else RelpropError):
            broken.save(folder, **arguments)
        assert contents(folder) == before
        assert names(folder) == listed
        assert names(tmp_path) == ["out"]
        assert_same(Explanation.load(folder), first)

    @pytest.mark.parametrize("case", range(6))
    def test_a_failure_leaves_nothing(self, tmp_path, case):
        broken, arguments, _ = self.failures()[case]
        with pytest.raises(RelpropError):
            broken.save(tmp_path / "out", **arguments)
        assert not names(tmp_path)

    @pytest.mark.parametrize(
        ("images", "words"),
        [
            ([Image.new("RGB", (5, 5))], "2 here, not 1"),
            (Image.new("RGB", (5, 5)), "2 here, not one Image"),
            ([], "2 here, not"),
        ],
    )
    def test_one_image_a_sample(self, tmp_path, images, words):
        with pytest.raises(RelpropError, match=words):
            make().save(tmp_path / "out", images)

    def test_a_file_is_no_folder(self, tmp_path):
        (tmp_path / "out").write_text("mine")
        with pytest.raises(RelpropError, match="is a file"):
            make().save(tmp_path / "out")
        assert (tmp_path / "out").read_text() == "mine"


class TestLoad:
    @pytest.mark.parametrize("inputs", INPUTS)
    @pytest.mark.parametrize("batch", [(1,), (2, 3)])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_round_trip(self, tmp_path, inputs, batch, dtype):
        e = make(inputs, batch, dtype, layers=[("layer1.0", 0), ("layer1.0", 1)])
        e.save(tmp_path)
        assert_same(Explanation.load(tmp_path), e)

    @given(
        values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=12),
        keys=st.lists(st.tuples(st.text(max_size=130), st.integers(0, 3)), max_size=4, unique=True),
        settings=st.dictionaries(
            st.text(), st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
        ),
    )
    def test_round_trip_of_anything(self, tmp_path_factory, values, keys, settings):
        folder = tmp_path_factory.mktemp("out")
        e = Explanation(
            relevance=torch.tensor([values]),
            target=torch.tensor([0]),
            start=torch.tensor([values[0]]),
            output=torch.tensor([values]),
            ledger=make_ledger((1,)),
            layers={key: torch.tensor([values]) * i for i, key in enumerate(keys)},
            settings=settings,
        )
        e.save(folder, quantize=False)
        assert_same(Explanation.load(folder), e)

    def test_memory_layout_and_gradients_do_not_matter(self, tmp_path):
        e = make()
        turned = e.relevance.contiguous(memory_format=torch.channels_last).requires_grad_()
        Explanation(turned, e.target, e.start, e.output, e.ledger, e.layers, e.settings).save(tmp_path)
        assert_same(Explanation.load(tmp_path), e)

    def test_loaded_tensors_can_be_written_to(self, tmp_path):
        make().save(tmp_path)
        e = Explanation.load(tmp_path)
        e.relevance.zero_()
        assert e.heatmap.abs().max() == 0

    def test_pictures_may_be_missing(self, tmp_path):
        e = make()
        e.save(tmp_path)
        (tmp_path / "heatmap-000.png").unlink()
        assert_same(Explanation.load(tmp_path), e)

    @pytest.mark.parametrize("name", ["relevance.npy", "target.npy", "start.npy", "output.npy", "layer-000-fc.npy"])
    def test_missing_and_changed_arrays(self, tmp_path, name):
        make(layers=[("fc", 0)]).save(tmp_path)
        data = bytearray((tmp_path / name).read_bytes())
        data[-1] ^= 1
        (tmp_path / name).write_bytes(data)
        with pytest.raises(RelpropError, match=rf"^\S*{name} was changed"):
            Explanation.load(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(RelpropError, match=rf"^\S*{name} is missing"):
            Explanation.load(tmp_path)

    def test_nothing_is_unpickled(self, tmp_path):
        make().save(tmp_path)
        buffer = BytesIO()
        np.save(buffer, np.array([{"code": "runs"}], dtype=object), allow_pickle=True)
        (tmp_path / "output.npy").write_bytes(buffer.getvalue())
        self.edit(tmp_path, lambda m: m["files"].update({"output.npy": hashlib.sha256(buffer.getvalue()).hexdigest()}))
        with pytest.raises(RelpropError, match=r"output\.npy is not a plain numpy array"):
            Explanation.load(tmp_path)

    def test_nothing_is_read_outside_the_folder(self, tmp_path):
        make().save(tmp_path / "out")
        np.save(tmp_path / "secret.npy", np.zeros(2))
        self.edit(tmp_path / "out", lambda m: m["arrays"][0].update(file="../secret.npy"))
        with pytest.raises(RelpropError, match="outside its folder"):
            Explanation.load(tmp_path / "out")

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda m: m.update(version=2, relprop="9.9"), r"version 2.*reads 1.*relprop 9\.9"),
            (lambda m: m.update(format="other"), "not the manifest of a saved explanation"),
            (lambda m: m.pop("files"), "damaged"),
            (lambda m: m.pop("arrays"), "damaged"),
            (lambda m: m["arrays"].pop(0), r"damaged.*relevance\.npy"),
            (lambda m: m["arrays"][0].update(dtype="load"), "damaged"),
            (lambda m: m["arrays"][0].pop("file"), "damaged"),
            (lambda m: m.pop("settings"), "damaged"),
            (lambda m: m["ledger"].pop("edges"), "damaged"),
            (lambda m: m["ledger"].update(start="text"), "damaged"),
            (lambda m: m["ledger"]["start"].append([1.0, 2.0, 3.0]), "damaged"),
        ],
    )
    def test_damaged_manifest(self, tmp_path, change, words):
        make().save(tmp_path)
        self.edit(tmp_path, change)
        with pytest.raises(RelpropError, match=words):
            Explanation.load(tmp_path)

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe"])
    def test_manifest_that_is_none(self, tmp_path, data):
        make().save(tmp_path)
        (tmp_path / "manifest.json").write_bytes(data)
        with pytest.raises(RelpropError, match=r"manifest\.json is"):
            Explanation.load(tmp_path)

    def test_nothing_there(self, tmp_path):
        (tmp_path / "file").touch()
        for folder in (tmp_path, tmp_path / "missing", tmp_path / "file"):
            with pytest.raises(RelpropError, match="holds no saved explanation"):
                Explanation.load(folder)

    @staticmethod
    def edit(folder, change):
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))
