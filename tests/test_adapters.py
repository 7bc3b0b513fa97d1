"""Each adapter inside the library that it is made for."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn

import relprop.adapters
from relprop.compat import import_torchvision
from relprop.images import PHOTO
from relprop.state import State

import_torchvision()  # before all that import it themselves


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return tiny.model().module


@pytest.fixture(autouse=True)
def untouched(net: nn.Module) -> Iterator[None]:
    """After every adapter, the model is as it was."""
    before = State(net)
    yield
    assert before.holds(net)
    assert not net.training
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._backward_hooks for m in net.modules())


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def logit(net: nn.Module, x: Tensor, target: Any) -> relprop.Explanation:
    return relprop.explain(net, x, target, start="logit")


def test_a_missing_library_is_named_when_its_adapter_is_asked_for() -> None:
    code = """
import sys
from importlib import import_module
import relprop.adapters
assert not {"captum", "quantus", "zennit", "pytorch_grad_cam", "transformers"} & sys.modules.keys()
from relprop import RelpropError
for name in ("captum", "transformers"):
    sys.modules[name] = None  # as if it were not installed
    try:
        import_module(f"relprop.adapters.{name}")
    except RelpropError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "This needs captum; install it with pip install 'relprop[methods]'.",
        "This needs transformers; install it with pip install 'transformers'.",
    ]


# -- captum ------------------------------------------------------------------------------------------------------------


def test_captum_classes_are_captums_own(net: nn.Module) -> None:
    import captum.attr as theirs

    from relprop.adapters import captum as ours

    assert issubclass(ours.LRP, theirs.Attribution | relprop.LRP)
    assert issubclass(ours.LayerLRP, theirs.LayerAttribution | ours.LRP)
    assert ours.LRP(net).forward_func is net
    for name in ("LRP", "LayerLRP"):
        mine, captums = (inspect.signature(getattr(module, name).attribute).parameters for module in (ours, theirs))
        assert list(mine) == list(captums)
        assert [p.default for p in mine.values()] == [p.default for p in captums.values()]


def test_captum_lrp_is_relprop_lrp(net: nn.Module) -> None:
    from relprop.adapters.captum import LRP

    method, x = LRP(net, preset="epsilon"), images()
    attributions, delta = method.attribute(x, target=[3, 7], return_convergence_delta=True)
    want, missing = relprop.LRP(net, preset="epsilon").attribute(x, [3, 7], return_convergence_delta=True)
    assert torch.equal(attributions, want)
    assert torch.equal(delta, missing)
    assert delta.abs().max() > 1e-3
    assert method.has_convergence_delta()
    assert method.multiplies_by_inputs
    again = method.compute_convergence_delta(attributions, net(x).detach()[range(2), [3, 7]])
    torch.testing.assert_close(again, delta, atol=1e-5, rtol=0)


def test_captum_several_targets_have_an_axis_of_their_own(net: nn.Module) -> None:
    from relprop.adapters.captum import LRP, LayerLRP

    target = torch.tensor([[1, 2, 3], [4, 5, 6]])
    attributions, delta = LRP(net).attribute(images(), target=target, return_convergence_delta=True)
    assert attributions.shape == (2, 3, 3, 16, 16)
    assert delta.shape == (2, 3)
    for k in range(3):
        want = logit(net, images(), target[:, k]).relevance
        torch.testing.assert_close(attributions[:, k], want, rtol=1e-5, atol=1e-6)
    assert LayerLRP(net, net.block).attribute(images(), target=target).shape == (2, 3, 8, 8, 8)


def test_captum_a_single_target_in_a_tensor_is_for_all(net: nn.Module) -> None:
    from relprop.adapters.captum import LRP

    assert torch.equal(LRP(net).attribute(images(), torch.tensor([4])), LRP(net).attribute(images(), 4))


class Places(nn.Module):
    """A map of three classes, from two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, more: Tensor, scale: float = 1.0) -> Tensor:
        return self.conv(x + more).relu() * scale


def test_captum_a_tuple_is_a_place_in_a_map() -> None:
    from captum.attr import LRP as Captum  # noqa: N811

    from relprop.adapters.captum import LRP

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False)).eval()
    x, places = images(), [(1, 4, 5), (2, 9, 3)]
    ours = LRP(model, preset="epsilon").attribute(x, target=places)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Input Tensor .* did not already require gradients")
        theirs = Captum(model).attribute(x.clone(), target=places)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert (ours != 0).sum((1, 2, 3)).tolist() == [27, 27]
    one = LRP(model, preset="paper", start="one").attribute(x, target=(1, 4, 5))
    torch.testing.assert_close(one.sum((1, 2, 3)), torch.ones(2))
    for wrong in ((1, 4), (1, 4, 99), [(1, 4, 5)], [(1, 4, 5), 3], ("a", 1, 2)):
        with pytest.raises(relprop.RelpropError, match="no place in an output of shape"):
            LRP(model).attribute(x, target=wrong)


def test_captum_other_arguments_of_the_model_have_their_share() -> None:
    from relprop.adapters.captum import LRP

    torch.manual_seed(0)
    model = Places().eval()
    x, more = images(), images() * 2
    result = relprop.explain(model, (x, more, 2.0), 1, start="logit")
    attributions, delta = LRP(model).attribute(x, 1, (more, 2.0), return_convergence_delta=True)
    assert torch.equal(attributions, result.relevance[0])
    assert delta.abs().max() <= 1e-5 * result.start.abs().max()


def test_captum_hidden_layers(net: nn.Module) -> None:
    from relprop.adapters.captum import LRP, LayerLRP

    x = images()
    kept = relprop.explain(net, x, 3, start="logit", layers=["block", "block:output", "head"])
    out = LayerLRP(net, net.block).attribute(x, target=3)
    into, delta = LayerLRP(net, "block").attribute(
        x, target=3, attribute_to_layer_input=True, return_convergence_delta=True
    )
    assert torch.equal(out, kept.relevance_at("block:output"))
    assert torch.equal(into, kept.relevance_at("block"))
    torch.testing.assert_close(delta, kept.start - into.sum((1, 2, 3)), atol=1e-5, rtol=0)
    assert delta.abs().max() > 0.1  # the skip has the rest
    several, deltas = LayerLRP(net, [net.block, net.head]).attribute(x, 3, return_convergence_delta=True)
    assert [r.shape for r in several] == [(2, 8, 8, 8), (2, 10)]
    assert deltas[1].abs().max() <= 1e-5  # the head's output is the model's
    assert LayerLRP.interpolate(out, (16, 16)).shape == (2, 8, 16, 16)
    with pytest.raises(relprop.RelpropError, match="no module inside Net"):
        LayerLRP(net, nn.ReLU()).attribute(x, 3)
    with pytest.raises(relprop.RelpropError, match="nearest names are block"):
        LayerLRP(net, "blok").attribute(x, 3)
    assert isinstance(LayerLRP(net, "head"), LRP)


def test_captum_agrees_on_layers_of_a_plain_net() -> None:
    from captum.attr import LayerLRP as Captum

    from relprop.adapters.captum import LayerLRP

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 6, 12))
    model, x = model.eval(), images()
    ours = LayerLRP(model, model[2], preset="epsilon").attribute(x, target=(2, 0, 0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Input Tensor .* did not already require gradients")
        theirs = Captum(model, model[2]).attribute(x.clone(), target=(2, 0, 0))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_captum_a_layer_that_is_called_twice_is_asked_for_by_call() -> None:
    from relprop.adapters.captum import LayerLRP

    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 5), relu, nn.Linear(5, 6), relu, nn.Linear(6, 2)).eval()
    x = torch.ones(1, 4)
    with pytest.raises(relprop.RelpropError, match="called 2 times"):
        LayerLRP(model, relu).attribute(x, 0)
    assert LayerLRP(model, "1#0").attribute(x, 0).shape == (1, 5)
    assert LayerLRP(model, "1#1").attribute(x, 0).shape == (1, 6)


def test_captum_noise_tunnel(net: nn.Module) -> None:
    from captum.attr import NoiseTunnel

    from relprop.adapters.captum import LRP, LayerLRP

    x, target = images(), torch.tensor([[1, 2], [3, 4]])
    exact, deltas = NoiseTunnel(LRP(net)).attribute(
        x, nt_samples=3, stdevs=1e-9, target=[3, 7], return_convergence_delta=True
    )
    torch.testing.assert_close(exact, logit(net, x, [3, 7]).relevance, rtol=1e-3, atol=1e-5)
    assert deltas.shape == (6,)
    torch.manual_seed(0)
    mean = NoiseTunnel(LRP(net)).attribute(x, nt_samples=4, stdevs=0.3, target=3)
    torch.manual_seed(0)
    noisy = x.repeat_interleave(4, 0) + torch.normal(0, torch.full((8, 3, 16, 16), 0.3))
    want = logit(net, noisy, 3).relevance.reshape(2, 4, 3, 16, 16).mean(1)
    torch.testing.assert_close(mean, want, rtol=1e-3, atol=1e-5)
    several = NoiseTunnel(LRP(net)).attribute(x, nt_type="vargrad", nt_samples=2, stdevs=0.1, target=target)
    assert several.shape == (2, 2, 3, 16, 16)
    hidden = NoiseTunnel(LayerLRP(net, net.block)).attribute(x, nt_samples=2, stdevs=0.1, target=3)
    assert hidden.shape == (2, 8, 8, 8)


def test_captum_visualization(net: nn.Module) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from captum.attr import visualization
    from matplotlib import pyplot

    from relprop.adapters.captum import LRP

    x = images(1)
    attributions = LRP(net).attribute(x, target=3)[0].permute(1, 2, 0).numpy()
    photo = x[0].permute(1, 2, 0).sigmoid().numpy()
    figure, axes = visualization.visualize_image_attr(
        attributions, photo, method="blended_heat_map", sign="all", show_colorbar=True, use_pyplot=False
    )
    drawn = axes.images[-1].get_array()
    assert drawn.shape == (16, 16)
    assert np.corrcoef(drawn.ravel(), attributions.sum(2).ravel())[0, 1] > 0.9
    both, _ = visualization.visualize_image_attr_multiple(
        attributions, photo, ["original_image", "heat_map"], ["all", "positive"], use_pyplot=False
    )
    assert len(both.axes) >= 2
    pyplot.close("all")
    assert figure is not both


# -- Quantus -----------------------------------------------------------------------------------------------------------


def test_quantus_evaluate(net: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    import quantus

    from relprop.adapters.quantus import explain_func

    x, y = images(4).numpy(), np.array([1, 2, 3, 4])
    quiet = {"disable_warnings": True, "display_progressbar": False}
    metrics = {
        "sparseness": quantus.Sparseness(**quiet),
        "max-sensitivity": quantus.MaxSensitivity(nr_samples=2, **quiet),
        "flipping": quantus.PixelFlipping(features_in_step=64, perturb_baseline="black", **quiet),
        "random-logit": quantus.RandomLogit(num_classes=10, seed=0, **quiet),
        "mprt": quantus.MPRT(**quiet),
        "completeness": quantus.Completeness(
            abs=False, disable_warnings=True, output_func=lambda v: v, perturb_baseline="black"
        ),
    }
    methods = {"relprop": explain_func, "epsilon": explain_func, "mine": explain_func}
    scores = quantus.evaluate(metrics, methods, net, x, y, explain_func_kwargs={"start": "logit"})
    assert "Failed to evaluate" not in capsys.readouterr().out
    for name in ("sparseness", "max-sensitivity", "random-logit"):
        assert len(scores["relprop"][name]) == 4, name
        assert np.isfinite(scores["relprop"][name]).all(), name
    assert scores["mine"]["sparseness"] == scores["relprop"]["sparseness"]  # no preset is called so
    assert scores["epsilon"]["sparseness"] != scores["relprop"]["sparseness"]
    want = relprop.explain(net, images(4), y, start="logit").heatmap.abs()
    gini = [_gini(w.flatten().double()) for w in want]
    np.testing.assert_allclose(scores["relprop"]["sparseness"], gini, rtol=1e-4)


def _gini(values: Tensor) -> float:
    ranked, n = values.sort().values, len(values)
    return float((torch.arange(1, n + 1) * 2 - n - 1).double() @ ranked / (n * ranked.sum()))


def test_quantus_function_takes_arrays_of_any_precision(net: nn.Module) -> None:
    from relprop.adapters.quantus import explain_func

    x = images()
    found = explain_func(model=net, inputs=x.double().numpy(), targets=np.array([3, 7]), method="label", device="cpu")
    want = relprop.explain(net, x, [3, 7])
    assert found.shape == (2, 1, 16, 16)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[:, 0], want.heatmap.numpy(), rtol=1e-5, atol=1e-9)
    chosen = explain_func(net, x, [3, 7], method="epsilon", preset="mixture")
    np.testing.assert_allclose(chosen[:, 0], relprop.explain(net, x, [3, 7], preset="mixture").heatmap, atol=1e-9)
    features = nn.Sequential(nn.Linear(4, 3)).eval()
    assert explain_func(features, np.ones((2, 4)), [0, 1]).shape == (2, 4)
    with pytest.raises(relprop.RelpropError, match="training mode"):
        explain_func(nn.Sequential(nn.Linear(4, 3)).train(), np.ones((2, 4)), [0, 1])


# -- pytorch-grad-cam --------------------------------------------------------------------------------------------------


def test_grad_cam_callable(net: nn.Module) -> None:
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.image import show_cam_on_image
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget, ClassifierOutputTarget

    from relprop.adapters.grad_cam import LRP

    x = images()
    targets = [ClassifierOutputTarget(3), ClassifierOutputSoftmaxTarget(7)]
    theirs = inspect.signature(GradCAM.__call__).parameters
    assert list(inspect.signature(LRP.__call__).parameters) == list(theirs)
    with LRP(model=net, percentile=100) as cam:
        maps = cam(input_tensor=x, targets=targets)
        assert torch.equal(cam.outputs, relprop.explain(net, x).output)
        assert np.array_equal(maps, cam(x, [3, np.int64(7)]))
    assert maps.shape == (2, 16, 16)
    assert maps.dtype == np.float32
    want = relprop.explain(net, x, [3, 7]).heatmap.clamp(min=0)
    torch.testing.assert_close(torch.from_numpy(maps), want / want.amax((1, 2), keepdim=True))
    clipped = LRP(net)(x, targets)
    assert clipped.max() == 1
    assert clipped.min() >= 0
    assert (clipped >= maps).all()
    assert (clipped == 1).sum() > 2
    photo = x[0].permute(1, 2, 0).sigmoid().numpy()
    picture = show_cam_on_image(photo, clipped[0], use_rgb=True)
    assert picture.shape == (16, 16, 3)
    assert picture.dtype == np.uint8


def test_grad_cam_metric_ranks_the_map(net: nn.Module) -> None:
    from pytorch_grad_cam.metrics.cam_mult_image import CamMultImageConfidenceChange
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget

    from relprop.adapters.grad_cam import LRP

    x = images()
    targets = [ClassifierOutputSoftmaxTarget(3)] * 2
    maps = LRP(net)(x, targets)
    change = CamMultImageConfidenceChange()(x, maps, targets, net)
    seen = net(x * torch.from_numpy(maps)[:, None]).softmax(1)[:, 3] - net(x).softmax(1)[:, 3]
    np.testing.assert_allclose(change, seen.numpy(), rtol=1e-4, atol=1e-6)


def test_grad_cam_target_layers(net: nn.Module) -> None:
    from relprop.adapters.grad_cam import LRP

    x = images()
    coarse = LRP(net, [net.block, "stem"], percentile=100)(x, [3, 7])
    assert coarse.shape == (2, 16, 16)
    assert coarse.max((1, 2)).tolist() == [1, 1]
    assert not np.array_equal(coarse, LRP(net, [net.block], percentile=100)(x, [3, 7]))
    dark = LRP(net)(x, [3, 7]) * 0
    assert np.array_equal(LRP(net, start=torch.zeros(2))(x, [3, 7]), dark)  # nothing to scale
    for wrong, sentence in (
        ({"targets": [lambda output: output[3]] * 2}, "is no class"),
        ({"targets": [3, 7], "aug_smooth": True}, "not offered"),
    ):
        with pytest.raises(relprop.RelpropError, match=sentence):
            LRP(net)(x, **wrong)
    with pytest.raises(relprop.RelpropError, match="feature maps"):
        LRP(net, ["head"])(x, [3, 7])
    with pytest.raises(relprop.RelpropError, match="percentile"):
        LRP(net, percentile=0)


# -- zennit ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 12), nn.ReLU(), nn.Linear(12, 10)),
    ).eval()


def zennits(model: nn.Module, composite: Any) -> Any:
    from zennit.attribution import Gradient

    return Gradient(model, composite)


def test_zennit_attributor_has_the_same_numbers(plain: nn.Module) -> None:
    from zennit.composites import EpsilonPlusFlat, LayerMapComposite, layer_map_base
    from zennit.rules import Epsilon
    from zennit.types import Linear

    from relprop.adapters.zennit import Attributor

    model, x = plain.double(), images().double()
    pairs = {
        "epsilon": LayerMapComposite([(Linear, Epsilon(1e-6)), *layer_map_base(1e-6)]),
        "epsilon-plus-flat": EpsilonPlusFlat(),
    }
    hot = torch.eye(10, dtype=torch.float64)[[3, 7]]
    for preset, composite in pairs.items():
        for start in (hot, None, lambda output: output * hot):
            with zennits(model, composite) as theirs, Attributor(model, preset) as ours:
                output, relevance = ours(x, start)
                expected, want = theirs(x.clone(), start)
            torch.testing.assert_close(output, expected)
            assert (relevance - want).abs().max() <= 1e-6 * want.abs().max(), (preset, start)
    with Attributor(model, "epsilon", attr_output=[3, 7]) as ours:
        by_class = ours(x)[1]
    torch.testing.assert_close(by_class, Attributor(model, "epsilon")(x, hot)[1])
    model.float()


def test_zennit_attributor_agrees_on_a_resnet(torchvision_model: Any) -> None:
    """With zennit's canonizer, which makes modules of sums and merges batch norms: on a copy, for it changes both."""
    from zennit.composites import LayerMapComposite, layer_map_base
    from zennit.rules import Epsilon
    from zennit.torchvision import ResNetCanonizer
    from zennit.types import Linear

    from relprop.adapters.zennit import Attributor

    model, copy = (torchvision_model("resnet18").double() for _ in range(2))
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hot = torch.eye(1000, dtype=torch.float64)[[281]]
    composite = LayerMapComposite([(Linear, Epsilon(1e-6)), *layer_map_base(1e-6)], canonizers=[ResNetCanonizer()])
    with zennits(copy, composite) as theirs:
        _, want = theirs(x.clone(), hot)
    _, relevance = Attributor(model, "epsilon")(x, 281)
    assert (relevance - want).abs().max() <= 1e-4 * want.abs().max()


def test_zennit_composites_cannot_be_read(net: nn.Module) -> None:
    from zennit.composites import EpsilonPlusFlat

    from relprop.adapters.zennit import Attributor

    with pytest.raises(relprop.RelpropError, match=r"EpsilonPlusFlat.*preset's name"):
        Attributor(net, EpsilonPlusFlat())  # type: ignore[arg-type] # the wrong type is the point
    with pytest.raises(relprop.RelpropError, match=r"has to give finite relevance of shape \(2, 10\)"):
        Attributor(net)(images(), lambda output: output[0])


# -- nn.Module ---------------------------------------------------------------------------------------------------------


def test_module_among_modules(net: nn.Module) -> None:
    from relprop.adapters.module import Explainer

    x = images()
    explainer = Explainer(net, "heatmap", preset="mixture")
    want = relprop.explain(net, x, preset="mixture")
    assert torch.equal(nn.Sequential(nn.Identity(), explainer)(x), want.heatmap)
    assert torch.equal(Explainer(net)(x, target=[3, 7]), relprop.explain(net, x, [3, 7]).relevance)
    assert torch.equal(Explainer(net, "quantized", preset="mixture")(x), want.quantized())
    assert explainer.train().training
    assert not net.training
    assert torch.equal(explainer(x), want.heatmap)
    assert set(explainer.state_dict()) == {f"model.{name}" for name in net.state_dict()}
    own = tiny.model().module
    assert Explainer(own).double()(x.double()).dtype == torch.float64
    assert own.head.weight.dtype == torch.float64  # the model moved along
    with pytest.raises(relprop.RelpropError, match="'relevance', 'heatmap', 'quantized', not 'maps'"):
        Explainer(net, "maps")  # type: ignore[arg-type] # likewise


def test_module_of_a_loaded_model_knows_the_range_of_pixels() -> None:
    from relprop.adapters.module import Explainer

    model = tiny.model()
    x = model.prepare(PHOTO)[None]
    explained = Explainer(model, preset="epsilon-gamma-box")(x)
    assert torch.equal(explained, relprop.explain(model, x, preset="epsilon-gamma-box").relevance)


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")  # says torch
def test_module_inside_a_compiled_one(net: nn.Module) -> None:
    from relprop.adapters.module import Explainer

    compiled = torch.compile(nn.Sequential(nn.Identity(), Explainer(net, "heatmap")), backend="eager")
    assert torch.equal(compiled(images()), relprop.explain(net, images()).heatmap)


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hugging() -> dict[str, Any]:
    """A small residual network of transformers, with random weights, and its image processor."""
    from transformers import ConvNextImageProcessor, ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    labels = {i: f"label {i}" for i in range(7)}
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=7, id2label=labels)
    model = ResNetForImageClassification(config).eval()
    return {"model": model, "image_processor": ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=1.0)}


def test_transformers_pipeline_has_heatmaps_beside_its_scores(hugging: dict[str, Any]) -> None:
    from transformers import ImageClassificationPipeline, pipeline

    from relprop.adapters.transformers import ExplainedImageClassification

    model, photo = hugging["model"], str(PHOTO)
    before = State(model)
    classify = pipeline("image-classification", **hugging, pipeline_class=ExplainedImageClassification)
    plain = ImageClassificationPipeline(**hugging, device=model.device)
    for how in ({}, {"top_k": 3}, {"function_to_apply": "sigmoid"}, {"function_to_apply": "none", "top_k": 99}):
        ours, theirs = classify(photo, **how), plain(photo, **how)
        assert [row["label"] for row in ours] == [row["label"] for row in theirs]
        np.testing.assert_allclose([r["score"] for r in ours], [r["score"] for r in theirs], rtol=1e-5)
        for row in ours:
            assert row["heatmap"].shape == (32, 32)
            np.testing.assert_allclose(row["heatmap"].sum(), row["score"], rtol=1e-4)
    pixels = hugging["image_processor"](images=_photo(), return_tensors="pt")["pixel_values"]
    label = next(i for i, name in model.config.id2label.items() if name == classify(photo)[1]["label"])
    want = relprop.explain(model, pixels, label, preset="mixture").heatmap[0]
    found = classify(photo, top_k=2, explain_kwargs={"preset": "mixture"})[1]["heatmap"]
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-7)
    batch = classify([photo, photo, photo], top_k=1, batch_size=2)
    assert [len(rows) for rows in batch] == [1, 1, 1]
    np.testing.assert_allclose(batch[2][0]["heatmap"], classify(photo)[0]["heatmap"], rtol=1e-4, atol=1e-7)
    assert before.holds(model)


def _photo() -> Any:
    from PIL import Image

    return Image.open(PHOTO).convert("RGB")


# -- the examples in their docstrings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", relprop.adapters.__all__)
def test_the_example_of(
    name: str,
    torchvision_model: Any,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(shutil.copy(PHOTO, tmp_path / "photo.jpg").parent)
    module = import_module(f"relprop.adapters.{name}")
    (example,) = re.findall(r"```python\n(.*?)```", module.__doc__ or "", re.DOTALL)
    x = torch.rand(1, 3, 32, 32)
    given = {"torch": torch, "model": torchvision_model("resnet18"), "x": x, "images": x, "normalise": nn.Identity()}
    given["rgb"] = x[0].permute(1, 2, 0).numpy()
    if name == "quantus":
        given |= {"x": x.numpy(), "y": np.array([281])}
    if name == "transformers":
        hugging = request.getfixturevalue("hugging")
        given |= {"model": hugging["model"], "processor": hugging["image_processor"]}
    exec(compile(example, name, "exec"), given)
    assert "Failed to evaluate" not in capsys.readouterr().out
    shapes = {"several": (1, 2, 3, 32, 32), "hidden": (1, 512, 1, 1), "heatmaps": (1, 32, 32), "grayscale": (1, 32, 32)}
    for key, shape in shapes.items():
        assert key not in given or given[key].shape == shape, key
