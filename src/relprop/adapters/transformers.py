"""transformers' image-classification pipeline, with a heatmap for each label that it gives.

```python
from relprop.adapters.transformers import ExplainedImageClassification

classify = ExplainedImageClassification(model=model, image_processor=processor)
for found in classify("photo.jpg", top_k=2):
    found["label"], found["score"], found["heatmap"]     # "tabby", 0.62, an array (H, W)
```

``transformers.pipeline("image-classification", model=..., pipeline_class=ExplainedImageClassification)`` makes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relprop.engine import explain
from relprop.methods.method import extra

__all__ = ["ExplainedImageClassification"]

if TYPE_CHECKING:  # as much of transformers as is used

    class ImageClassificationPipeline:
        model: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]: ...

else:
    ImageClassificationPipeline = extra("transformers", "transformers").ImageClassificationPipeline


class ExplainedImageClassification(ImageClassificationPipeline):
    """transformers' ``ImageClassificationPipeline``, whose answers have a ``heatmap`` beside ``label`` and ``score``.

    It takes what that one takes, and gives the same labels and scores. A heatmap is an array ``(H, W)`` of the size
    that the image processor gives an image, and sums to its label's score.

    Args:
        *args: As there.
        explain_kwargs: Options for :func:`relprop.explain`, such as ``{"preset": "mixture"}``; a call takes them too.
        **kwargs: As there: ``model``, ``image_processor``, ``top_k``, ``function_to_apply``, ``batch_size`` ... The
            device is the model's unless named, so that the model stays where it is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model = kwargs.get("model", args[0] if args else None)
        if kwargs.get("device") is None and isinstance(model, torch.nn.Module):
            kwargs["device"] = next(model.parameters()).device
        super().__init__(*args, **kwargs)

    def _sanitize_parameters(
        self,
        top_k: int | None = None,
        explain_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        before, forward, after = super()._sanitize_parameters(**kwargs)
        if top_k is not None:
            forward = {**forward, "top_k": top_k}
        if explain_kwargs is not None:
            forward = {**forward, "explain_kwargs": dict(explain_kwargs)}
        return before, forward, after

    def _forward(
        self, model_inputs: Any, top_k: int = 5, explain_kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, Tensor]:
        logits = self.model(**model_inputs).logits
        found = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        # One at each label: what a score is made of the logits with is seen afterwards.
        result = explain(self.model, dict(model_inputs), found, start="one", **(explain_kwargs or {}))
        return {"logits": logits, "target": found, "heatmap": result.heatmap["pixel_values"]}

    def postprocess(self, model_outputs: Any, function_to_apply: Any = None) -> list[dict[str, Any]]:
        """The labels of one image with their scores and heatmaps, the best first."""
        logits, target, heatmap = (model_outputs[key][0] for key in ("logits", "target", "heatmap"))
        scores = self._scores(logits.float(), function_to_apply)
        return [
            {
                "label": self.model.config.id2label[index],
                "score": float(scores[index]),
                "heatmap": (map_.float() * scores[index]).cpu().numpy(),
            }
            for index, map_ in zip(target.tolist(), heatmap, strict=True)
        ]

    def _scores(self, logits: Tensor, function: Any) -> Tensor:
        """As transformers has it: a sigmoid where labels do not exclude each other, else a softmax."""
        config = self.model.config
        alone = config.problem_type == "multi_label_classification" or config.num_labels == 1
        name = ("sigmoid" if alone else "softmax") if function is None else str(getattr(function, "value", function))
        return logits.sigmoid() if name == "sigmoid" else logits.softmax(0) if name == "softmax" else logits
