"""Adapters: relprop behind the interfaces that users of other libraries know, each in a module of its own.

| module | what it gives | for users of |
|---|---|---|
| :mod:`relprop.adapters.captum` | ``LRP``, ``LayerLRP`` | Captum, with its ``NoiseTunnel`` and pictures |
| :mod:`relprop.adapters.quantus` | ``explain_func`` | Quantus' ``evaluate`` and metrics |
| :mod:`relprop.adapters.grad_cam` | ``LRP`` | pytorch-grad-cam |
| :mod:`relprop.adapters.zennit` | ``Attributor`` | zennit |
| :mod:`relprop.adapters.module` | ``Explainer`` | anything that wants an ``nn.Module`` |
| :mod:`relprop.adapters.transformers` | ``ExplainedImageClassification`` | transformers' pipelines |

Nothing is imported here: each module imports its library, where it needs one, when it is imported itself.
"""

__all__ = ["captum", "grad_cam", "module", "quantus", "transformers", "zennit"]
