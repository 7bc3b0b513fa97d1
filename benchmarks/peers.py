"""The peers: other libraries' explanations, each as its documentation would have it, with its set-up done before."""

import copy
from collections.abc import Callable

import torch
from subject import CLASSES
from torch import Tensor, nn

Run = Callable[[Tensor, Tensor], object]  # (images, one target an image)


def gradient(model: nn.Module) -> Run:
    """One forward pass and the gradient of the target's logit at the input."""

    def run(x: Tensor, target: Tensor) -> object:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(model(x).gather(1, target[:, None]).sum(), x)

    return run


def grad_cam(model: nn.Module) -> Run:
    """pytorch-grad-cam's Grad-CAM of the last stage."""
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    model = copy.deepcopy(model)
    layer = model.get_submodule("layer4")[-1]
    # It needs gradients at the layer, and a frozen model has none: one bias is enough, and they go no further.
    layer.bn3.bias.requires_grad_()
    cam = GradCAM(model=model, target_layers=[layer])
    return lambda x, target: cam(input_tensor=x, targets=[ClassifierOutputTarget(t) for t in target.tolist()])


def captum_lrp(model: nn.Module) -> Run:
    """Captum's LRP, with the epsilon rule that is its default."""
    from captum.attr import LRP

    method = LRP(own_modules(model))
    return lambda x, target: method.attribute(x.clone().requires_grad_(), target=target)


def own_modules(model: nn.Module) -> nn.Module:
    """Copy the model so that each call has a module of its own: captum raises when one ReLU is called twice."""
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    seen: set[str] = set()
    for node in traced.graph.nodes:
        if node.op == "call_module":
            if node.target in seen:
                fresh = f"{node.target}_{node.name}"
                traced.add_submodule(fresh, copy.deepcopy(traced.get_submodule(node.target)))
                node.target = fresh
            seen.add(node.target)
    for module in traced.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # captum's hooks look at a ReLU's input after it has run
    traced.recompile()
    return traced


def zennit_lrp(model: nn.Module) -> Run:
    """Zennit's EpsilonPlusFlat with the canonizer it brings for torchvision's ResNets."""
    from zennit.attribution import Gradient
    from zennit.composites import EpsilonPlusFlat
    from zennit.torchvision import ResNetCanonizer

    # Opened once and never closed, on a copy: setting up is not timed, as relprop's plan is made once too.
    attributor = Gradient(copy.deepcopy(model), EpsilonPlusFlat(canonizers=[ResNetCanonizer()]))
    attributor.__enter__()
    return lambda x, target: attributor(x, nn.functional.one_hot(target, CLASSES).to(x.dtype))


PEERS: dict[str, Callable[[nn.Module], Run]] = {
    "forward + input gradient": gradient,
    "pytorch-grad-cam, Grad-CAM of `layer4`": grad_cam,
    "captum LRP (epsilon)": captum_lrp,
    "zennit EpsilonPlusFlat, ResNetCanonizer": zennit_lrp,
}
