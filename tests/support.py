"""Which models relprop supports: a list, and what each of them has to show.

`make support` examines all of them and writes docs/support.md; `test_support.py` examines a few. Rows are kept as they
come: a second run goes on where the first one stopped and looks again at what failed. `make clean` forgets them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import sums
import torch
from torch import Tensor, nn

import relprop
from relprop.attention import Matrices
from relprop.compat import import_torchvision
from relprop.gates import Product
from relprop.plans import Plan

TOLERANCE = 1e-4
"""What may be missing end to end, relative, that the ledger does not name."""

# Library, name and size of the smallest input that the model accepts (or that leaves it something to look at).
TORCHVISION = """
    alexnet:64 convnext_base:32 convnext_large:32 convnext_small:32 convnext_tiny:32 densenet121:32 densenet161:32
    densenet169:32 densenet201:32 efficientnet_b0:32 efficientnet_b1:32 efficientnet_b2:32 efficientnet_b3:32
    efficientnet_b4:32 efficientnet_b5:32 efficientnet_b6:32 efficientnet_b7:32 efficientnet_v2_l:32
    efficientnet_v2_m:32 efficientnet_v2_s:32 googlenet:64 inception_v3:96 maxvit_t:224 mnasnet0_5:32 mnasnet0_75:32
    mnasnet1_0:32 mnasnet1_3:32 mobilenet_v2:32 mobilenet_v3_large:32 mobilenet_v3_small:32 regnet_x_16gf:32
    regnet_x_1_6gf:32 regnet_x_32gf:32 regnet_x_3_2gf:32 regnet_x_400mf:32 regnet_x_800mf:32 regnet_x_8gf:32
    regnet_y_16gf:32 regnet_y_1_6gf:32 regnet_y_32gf:32 regnet_y_3_2gf:32 regnet_y_400mf:32 regnet_y_800mf:32
    regnet_y_8gf:32 resnet101:32 resnet152:32 resnet18:32 resnet34:32 resnet50:32 resnext101_32x8d:32
    resnext101_64x4d:32 resnext50_32x4d:32 shufflenet_v2_x0_5:32 shufflenet_v2_x1_0:32 shufflenet_v2_x1_5:32
    shufflenet_v2_x2_0:32 squeezenet1_0:32 squeezenet1_1:32 swin_b:32 swin_s:32 swin_t:32 swin_v2_b:32 swin_v2_s:32
    swin_v2_t:32 vgg11:32 vgg11_bn:32 vgg13:32 vgg13_bn:32 vgg16:32 vgg16_bn:32 vgg19:32 vgg19_bn:32 vit_b_16:224
    vit_b_32:224 vit_l_16:224 vit_l_32:224 wide_resnet101_2:32 wide_resnet50_2:32 r3d_18:32 mc3_18:32 r2plus1d_18:32
    s3d:224 fcn_resnet50:64 deeplabv3_resnet50:64 deeplabv3_mobilenet_v3_large:64 lraspp_mobilenet_v3_large:64
    mvit_v1_b:224 mvit_v2_s:224 swin3d_t:32
"""
TIMM = """
    resnet10t:32 resnetv2_18:64 seresnet18:64 resnest14d:64 regnetz_005:64 ecaresnet26t:64 res2net50_26w_4s:64
    skresnet18:64 convnext_atto:32 convnextv2_atto:32 efficientnet_lite0:32 tf_efficientnet_b0:64
    mobilenetv3_small_050:32 mobilenetv4_conv_small:64 densenet121:32 dla34:64 hrnet_w18_small:64 ghostnet_050:32
    repvgg_a0:32 dm_nfnet_f0:64 vit_tiny_patch16_224:32 deit_tiny_patch16_224:32 swin_tiny_patch4_window7_224:56
    mixer_s32_224:64 maxvit_rmlp_pico_rw_256:64 coatnet_pico_rw_224:64 poolformer_s12:64 legacy_xception:64
    inception_v4:96 inception_resnet_v2:96 cspresnet50:64 cspdarknet53:64 vovnet39a:64 selecsls42b:64 rexnet_100:64
    tresnet_m:64 gernet_s:64 nasnetalarge:96 pnasnet5large:96 dpn68:64 hardcorenas_a:64 fbnetc_100:64 spnasnet_100:64
    mnasnet_small:64 lcnet_050:32 tinynet_e:64 levit_128s:224 xcit_nano_12_p8_224:32 cait_xxs24_224:32
    tnt_s_patch16_224:224 pit_ti_224:224 convit_tiny:224 crossvit_tiny_240:240 visformer_tiny:224 twins_svt_small:224
    coat_tiny:224 pvt_v2_b0:32 gmlp_ti16_224:224 resmlp_12_224:224 gmixer_12_224:224 convmixer_768_32:64
    beit_base_patch16_224:32 eva02_tiny_patch14_224:28 edgenext_xx_small:64 efficientformer_l1:224
    efficientformerv2_s0:224 mobilevit_xxs:64 mobilevitv2_050:64 mobileone_s0:64 fastvit_t8:64 focalnet_tiny_srf:64
    davit_tiny:64 volo_d1_224:224 sequencer2d_s:56 caformer_s18:64 convformer_s18:64 inception_next_tiny:64
    repvit_m0_9:64 tiny_vit_5m_224:224 efficientvit_b0:64 efficientvit_m0:224 ghostnetv2_100:64 hgnet_tiny:64
    hgnetv2_b0:64 starnet_s1:64 shvit_s1:64 rdnet_tiny:64 nextvit_small:64 gcvit_xxtiny:224 mvitv2_tiny:224
    nest_tiny:224 hiera_tiny_224:224 vitamin_small_224:64 resnext50_32x4d:64 wide_resnet50_2:64 botnet26t_256:256
    halonet26t:256 lambda_resnet26t:256 regnetx_002:32 regnety_002:32 nf_resnet26:64 nf_regnet_b0:64
    swinv2_tiny_window8_256:64 swinv2_cr_tiny_224:224 flexivit_small:64 vit_relpos_small_patch16_224:224
    deit3_small_patch16_224:64 mambaout_femto:64 efficientnet_blur_b0:64 fasternet_t0:64 mobilenetv4_hybrid_medium:64
    vgg11_bn:32 swiftformer_xs:224
"""
MODELS = {
    f"{library}/{name}": int(size)
    for library, listed in (("torchvision", TORCHVISION), ("timm", TIMM))
    for name, _, size in (entry.partition(":") for entry in listed.split())
}
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v1_b", "mvit_v2_s", "swin3d_t")
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "support.md"
ROWS = ROOT / "build" / "support.jsonl"
"""A row a line; of two about the same model the later counts."""


@dataclass(frozen=True)
class Row:
    """What an examination found.

    Attributes:
        model: Library and name.
        shape: The input's.
        trouble: Why it is not supported; empty if it is.
        merges: How many sums join branches.
        halved: In how many products nothing tells the signal from the gate, so that both get half.
        traced: ``all shapes``, or ``one shape`` where the code needs to know it.
        error: What is missing end to end, relative.
        leak: The largest of one node.
        difference: Of the output from the untouched model's, relative to the largest value.
        absorbed: Shares of the start by cause.
        cost: In forward passes.
    """

    model: str
    shape: tuple[int, ...]
    trouble: str = ""
    merges: int = 0
    halved: int = 0
    traced: str = ""
    error: float = 0.0
    leak: float = 0.0
    difference: float = 0.0
    absorbed: dict[str, float] = field(default_factory=dict)
    cost: float = 0.0


def build(model: str, size: int) -> nn.Module:
    """A model with random weights, none of which leave a part of it without effect."""
    library, _, name = model.partition("/")
    torchvision = import_torchvision()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        if library == "torchvision":
            options = {"weights_backbone": None} if any(k in name for k in ("fcn", "deeplab", "lraspp")) else {}
            options |= {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
            net: nn.Module = torchvision.models.get_model(name, weights=None, **options)
        else:
            import timm

            try:
                net = timm.create_model(name, num_classes=10, img_size=size)
            except TypeError:  # convolutional models take any size
                net = timm.create_model(name, num_classes=10)
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 1.5)
                if module.affine:
                    module.weight.normal_(std=0.5)
                    module.bias.normal_(std=0.1)
        for parameter in net.parameters():
            if float(parameter.abs().max()) < 1e-3:  # heads and layer scales begin as nothing
                parameter.normal_(std=0.1)
    return net.eval()


def sample(model: str, size: int, batch: int = 2) -> Tensor:
    """An input of noise."""
    name = model.partition("/")[2]
    frames = (16,) if name in VIDEO else ()
    return torch.randn(batch, 3, *frames, size, size, generator=torch.Generator().manual_seed(1))


def answer(value: object) -> Tensor:
    """The tensor that is explained, of what a model returns."""
    while not isinstance(value, Tensor):
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]  # type: ignore[index] # or a tuple
    return value


def examine(model: str, *, timed: bool = False) -> Row:
    """Explains one batch, and compares."""
    x = sample(model, MODELS[model])
    shape = tuple(x.shape)
    try:
        net = build(model, MODELS[model])
        with torch.no_grad():
            expected = answer(net(x.clone()))
        e = relprop.explain(net, x, 1, preset="paper", start="one")
        plan = relprop.plan(net, x)
    except relprop.RelpropError as error:
        return Row(model, shape, str(error))
    start = e.start.double()
    absorbed = {cause: float((amount / start).mean()) for cause, amount in e.ledger.absorbed_by_cause.items()}
    # By a sum that knows nothing of the ledger's.
    arrived = e.relevance.double().flatten(1).sum(1) + sum(e.ledger.absorbed_by_cause.values(), start=torch.zeros(()))
    row = Row(
        model,
        shape,
        "" if torch.isfinite(e.relevance).all() else "relevance is not finite",
        plan.graph.merges,
        _halved(plan),
        "all shapes" if plan.graph.shape is None else "one shape",
        float(((arrived - start).abs() / start.abs()).max()),
        e.ledger.max_leak,
        float((e.output - expected).abs().max() / expected.abs().max()),
        absorbed,
        _cost(net, x) if timed else 0.0,
    )
    if not row.trouble and (max(row.error, row.leak) > TOLERANCE or row.difference > 1e-3):
        return Row(model, shape, f"error {row.error:.1e}, leak {row.leak:.1e}, output differs by {row.difference:.1e}")
    return row


def _halved(plan: Plan) -> int:
    count = 0
    for i in plan.reached:
        op, sizes = plan.graph.nodes[i].operator, [prod(plan.shapes[j]) for j in plan.graph.nodes[i].inputs]
        signals = (
            op.chosen(sizes, prod(plan.shapes[i]))
            if isinstance(op, Product)
            else op.signals
            if isinstance(op, Matrices)
            else ()
        )
        count += len(signals) == 2
    return count


def _cost(net: nn.Module, x: Tensor) -> float:
    """The median time of an explanation, in medians of forward passes: this process' own, which others do not stop."""

    def seconds(run: Callable[[], object]) -> float:
        taken: list[float] = []
        while len(taken) < 3 and sum(taken) < 0.5:
            begun = time.process_time()
            run()
            taken.append(time.process_time() - begun)
        return median(taken)

    with torch.no_grad():
        forward = seconds(lambda: net(x))
    return seconds(lambda: relprop.explain(net, x, 1, preset="paper", start="one")) / forward


def page(rows: Sequence[Row]) -> str:
    """The support matrix in Markdown."""
    supported = [row for row in rows if not row.trouble]
    greedy = [row.model for row in supported if sum(row.absorbed.values()) > 0.9]
    lines = [
        "# Supported models",
        "",
        f"Written by `make support`: {len(supported)} of {len(rows)} models pass. Each has random weights and a batch "
        "of two inputs of noise, of the smallest size it accepts, and gets the preset `paper` with a start of one at "
        "class 1. *Error* is what is missing between the start and the sum at the input after what the ledger names; "
        "*leak* the largest of one node; *absorbed* the named shares of the start, by cause, mean of the two; *cost* "
        "that of an explanation in forward passes of the untouched model, in processor time, beside other work. "
        "*Traced* tells if the graph is good for all shapes or was made for one; *halved* counts the products in which "
        "nothing tells the signal from the gate, so that both get half. A model's output is compared with the "
        "untouched model's. Constants (class tokens, positions, learned offsets) and padding take a share by "
        f"magnitude; with these weights and sizes it is more than 0.9 in {', '.join(greedy) or 'none'}, "
        "where little is left for the input.",
        "",
        "| model | input | status | traced | merges | halved | error | leak | absorbed | cost |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        size = "x".join(map(str, row.shape[1:]))
        if row.trouble:
            lines.append(f"| {row.model} | {size} | {row.trouble.replace('|', '/')} | | | | | | | |")
            continue
        causes = ", ".join(f"{cause} {share:.2g}" for cause, share in row.absorbed.items()) or "none"
        facts = (row.model, size, "yes", row.traced, row.merges, row.halved, f"{row.error:.0e}", f"{row.leak:.0e}")
        lines.append(f"| {' | '.join(map(str, (*facts, causes, f'{row.cost:.1f}')))} |")
    return "\n".join(lines) + "\n"


def _work(models: Sequence[str]) -> None:
    """Examines some models and keeps a row of each."""
    torch.set_num_threads(1)
    for model in models:
        try:
            row = examine(model, timed=True)
        except Exception as error:
            row = Row(model, (2,), f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        print(f"{model}: {row.trouble or f'error {row.error:.0e}, cost {row.cost:.1f}'}", flush=True)
        with ROWS.open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(asdict(row)) + "\n")


def kept() -> dict[str, Row]:
    """The rows of earlier runs."""
    lines = ROWS.read_text(encoding="utf-8").splitlines() if ROWS.exists() else []
    rows = (Row(**json.loads(line)) for line in lines)
    return {row.model: replace(row, shape=tuple(row.shape)) for row in rows if row.model in MODELS}


def main(models: Sequence[str]) -> int:
    """Examines the models named; or all that no earlier run found supported, and writes the page."""
    before = kept()
    chosen = list(models) or [model for model in MODELS if model not in before or before[model].trouble]
    ROWS.parent.mkdir(exist_ok=True)
    for first in range(0, len(chosen), 16):  # what a process leaves behind in memory goes with it
        worker = get_context("spawn").Process(target=_work, args=(chosen[first : first + 16],))
        worker.start()
        worker.join()
    rows = kept()
    found = [rows.get(model, Row(model, (2,), "was not examined")) for model in models or MODELS]
    failed = sum(bool(row.trouble) for row in found)
    if models:  # the page is about all of them
        return 1 if failed else 0
    other = sums.KEPT.read_text(encoding="utf-8") if sums.KEPT.exists() else ""
    PAGE.write_text(f"{page(found)}\n{other}".rstrip() + "\n", encoding="utf-8")
    return 1 if failed > 0.05 * len(MODELS) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
