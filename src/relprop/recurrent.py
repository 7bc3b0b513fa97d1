"""Recurrence: an LSTM, one step after another.

Written out in products and sums, it needs no rule of its own: sigmoids are gates, and the cell gets all relevance. This
is the signal-takes-all rule of Arras et al. (2019).

References:
    Arras et al., 2019: Explaining and Interpreting LSTMs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from relprop.operators import rewrite


@rewrite(nn.LSTM)
def _lstm(module: nn.LSTM, x: Any, hx: Any = None) -> tuple[Any, tuple[Any, Any]]:
    """What ``nn.LSTM`` computes for a batch that begins with nothing remembered."""
    if hx is not None or module.proj_size or module.training:
        msg = "an LSTM that is given a state, projects or drops at random has no rule"
        raise TypeError(msg)
    x = x if module.batch_first else x.transpose(0, 1)
    last: list[tuple[Any, Any]] = []
    for layer in range(module.num_layers):
        ways = []
        for way in range(1 + module.bidirectional):
            steps, cell = _run(module, x, f"_l{layer}" + way * "_reverse", backwards=bool(way))
            last.append((steps[-1], cell))
            ways.append(torch.stack(steps[::-1] if way else steps, 1))
        x = torch.cat(ways, -1) if module.bidirectional else ways[0]
    states = (torch.stack([h for h, _ in last], 0), torch.stack([c for _, c in last], 0))
    return (x if module.batch_first else x.transpose(0, 1)), states


def _run(module: nn.LSTM, x: Any, suffix: str, *, backwards: bool) -> tuple[list[Any], Any]:
    """The outputs of one layer in one direction, as they come, and the cell after the last."""
    inner, outer = getattr(module, f"weight_ih{suffix}"), getattr(module, f"weight_hh{suffix}")
    bias = getattr(module, f"bias_ih{suffix}") + getattr(module, f"bias_hh{suffix}") if module.bias else None
    seen = F.linear(x, inner, bias)
    steps: list[Any] = []
    cell: Any = None
    order = range(x.shape[1])
    for t in reversed(order) if backwards else order:
        sums = seen[:, t] + F.linear(steps[-1], outer) if steps else seen[:, t]
        i, f, g, o = sums.chunk(4, -1)
        new = i.sigmoid() * g.tanh()
        cell = new if cell is None else f.sigmoid() * cell + new
        steps.append(o.sigmoid() * cell.tanh())
    return steps, cell
