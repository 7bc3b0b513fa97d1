"""Convolutions as linear maps, with kernels packed for the shapes that come by."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from relprop.kernels import Kernel, packable, packed
from relprop.maps import LinearMap, Transform, uneven
from relprop.precision import multiplied

_Phase = tuple[tuple[Any, ...], list[int], Kernel | None]
"""Places of the input within a step, what is padded around the outputs for them, and what is then convolved."""

_SUM, _SHARE = 2.0**-7, 2.0**-12
"""Of sums of one sign, those that cancellation has left this little of are computed anew; by the former is divided."""


class Convolution(LinearMap):
    """A convolution over one to three axes, with groups, strides, dilation and zero padding.

    Args:
        weight: Kernel, ``(out, in / groups, *kernel)``.
        bias: One value an output channel, or None.
        stride: Step on each axis.
        padding: ``(before, after)`` on each axis; ``padding="same"`` may differ on the two sides.
        dilation: Spacing on each axis.
        groups: Number of groups.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        dilation: Sequence[int],
        groups: int,
    ) -> None:
        super().__init__(weight, None if bias is None else bias.reshape(-1, *[1] * (weight.ndim - 2)))
        self.stride, self.dilation, self.groups = list(stride), list(dilation), groups
        self.padding = list(padding)
        self.steps = uneven(weight.shape[2:], stride, dilation)
        self._flat_bias = bias
        self._forward: Tensor | None = None
        self._kernels: dict[Transform | None, Kernel] = {}
        self._back: dict[Transform, tuple[Any, list[_Phase]]] = {}
        self._padding = [before for before, after in padding]
        # Convolutions pad both sides alike; what is over on the far side is padded, and cropped on the way back, by
        # hand.
        self._extra = [after - before for before, after in padding]
        if any(extra < 0 for extra in self._extra):
            msg = "the far side of a convolution is never padded less than the near side"
            raise ValueError(msg)

    def __call__(self, a: Tensor) -> Tensor:
        if self._packs(a):
            return self._kernel(a, None)(a)
        if self._forward is None:
            self._forward = self._packed(self.weight)
        return multiplied(lambda a, w, bias: self._convolve(a, w, bias, self.groups), a, self._forward, self._flat_bias)

    def shape(self, before: Sequence[int]) -> tuple[int, ...]:
        """The shape that the map makes of another, which it fits.

        Raises:
            ValueError: If the kernel is larger than what it is to slide over.
        """
        sizes = []
        for n, k, s, d, (near, far) in zip(
            before[2:], self.weight.shape[2:], self.stride, self.dilation, self.padding, strict=True
        ):
            room = n + near + far - d * (k - 1) - 1
            if room < 0:
                msg = f"its kernel of {d * (k - 1) + 1} is larger than the input's {n}, padding included"
                raise ValueError(msg)
            sizes.append(room // s + 1)
        return (before[0], self.weight.shape[0], *sizes)

    def windows(self) -> list[LinearMap]:
        return [
            Convolution(torch.ones(1, 1, taps, dtype=torch.float64), None, [stride], [padding], [dilation], 1)
            for taps, stride, padding, dilation in zip(
                self.weight.shape[2:], self.stride, self.padding, self.dilation, strict=True
            )
        ]

    def activated(self, a: Tensor) -> Tensor:
        return self._kernel(a, None)(a, relu=True) if self._packs(a) else self(a).relu_()

    def sums(self, a: Tensor, transform: Transform) -> Tensor:
        return self._kernel(a, transform)(a) if self._packs(a) else super().sums(a, transform)

    def shares(self, s: Tensor, transform: Transform, shape: Sequence[int]) -> Tensor:
        if len(self.stride) != 2 or not packable(s[0]) or 0 in s.stride() or not self._has_phases:
            return super().shares(s, transform, shape)
        targets, s = len(s), s.flatten(0, 1)
        key = (s.shape, tuple(shape))
        known = self._back.get(transform)  # read once: another thread may put another shape's there
        if known is None or known[0] != key:
            known = self._back[transform] = key, self._phases(transform(self.weight), s.shape, shape)
        phases = known[1]
        if len(phases) == 1 and phases[0][2] is not None:
            return self._phase(s, phases[0]).reshape(targets, -1, *shape)
        result = torch.empty((len(s), *shape), dtype=s.dtype, memory_format=torch.channels_last)
        if any(kernel is None for *_, kernel in phases):
            result.zero_()  # what no output sees
        for phase in phases:
            if phase[2] is not None:
                result[phase[0]] = self._phase(s, phase)
        return result.reshape(targets, -1, *shape)

    @staticmethod
    def _phase(s: Tensor, phase: _Phase) -> Tensor:
        """What the inputs at one place within a step get."""
        _, around, kernel = phase
        assert kernel is not None
        return kernel(F.pad(s, around) if any(around) else s)

    @cached_property
    def _has_phases(self) -> bool:
        """Whether the transpose is best done as convolutions of stride one."""
        simple = self.dilation == [1, 1] or self.stride == [1, 1]
        return simple and not self._by_phases_pays(self.weight, self.groups)

    def _phases(self, weight: Tensor, after: Sequence[int], before: Sequence[int]) -> list[_Phase]:
        """The transpose as convolutions of stride one, one for every place within a step.

        Input ``y = t u + f`` sees output ``j`` through tap ``k = y + p - t j``. With ``f + p = t q + c``, the taps
        ``c + t m`` meet it at ``j = u + q - m``: a convolution with every t-th tap, turned around.
        """
        axes = [
            [
                ((f + p) % t, (f + p) // t, f, -(-(n - f) // t))  # first tap, its shift, place, number of places
                for f in range(t)
            ]
            for n, p, t in zip(before[1:], self._padding, self.stride, strict=True)
        ]
        turned = weight.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
        phases: list[_Phase] = []
        for rows, columns in product(*axes):
            if not rows[3] or not columns[3]:
                continue
            taps = turned[..., rows[0] :: self.stride[0], columns[0] :: self.stride[1]].flip(2, 3)
            place = (..., *(slice(f, None, t) for (_, _, f, _), t in zip((rows, columns), self.stride, strict=True)))
            if not taps.numel():
                phases.append((place, [], None))
                continue
            around: list[int] = []
            for axis, (_, shift, _, count) in ((1, columns), (0, rows)):
                around += [
                    self.dilation[axis] * (taps.shape[2 + axis] - 1) - shift,
                    shift + count - after[2 + axis],
                ]
            even = around[0] == around[1] >= 0 and around[2] == around[3] >= 0
            inside = [around[2], around[0]] if even else [0, 0]
            around = [0] * 4 if even else around
            padded = (*after[:2], after[2] + around[2] + around[3], after[3] + around[0] + around[1])
            kernel = packed(taps, None, ([1, 1], inside, self.dilation, self.groups), padded, _SHARE)
            phases.append((place, around, kernel))
        return phases

    def _packs(self, a: Tensor) -> bool:
        return packable(a) and not any(self._extra)

    def _kernel(self, a: Tensor, transform: Transform | None) -> Kernel:
        """The packed convolution with the model's weights and bias, or with transformed ones and none."""
        known = self._kernels.get(transform)
        if known is None or known.shape != a.shape:
            weight, bias = (self.weight, self._flat_bias) if transform is None else (transform(self.weight), None)
            how = self.stride, self._padding, self.dilation, self.groups
            known = self._kernels[transform] = packed(weight, bias, how, a.shape, 0.0 if transform is None else _SUM)
        return known

    def _packed(self, weight: Tensor) -> Tensor:
        return weight.contiguous(memory_format=torch.channels_last) if weight.ndim == 4 else weight

    def strided(self, stride: Sequence[int], padding: Sequence[tuple[int, int]]) -> Convolution:
        """The same kernel with another step and padding; itself if they are its own."""
        if list(stride) == self.stride and list(padding) == self.padding:
            return self
        return Convolution(self.weight, self._flat_bias, stride, padding, self.dilation, self.groups)

    def scaled(self, scale: Tensor, shift: Tensor) -> Convolution:
        """The map followed by one factor and one shift an output channel: a batch norm folded in."""
        weight = self.weight * scale.reshape(-1, *[1] * (self.weight.ndim - 1))
        bias = shift if self._flat_bias is None else self._flat_bias * scale + shift
        return Convolution(weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return multiplied(lambda a, weight: self._convolve(a, weight, None, self.groups), a, weight)

    def transpose(self, s: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
        return multiplied(lambda s, weight: self._transpose(s, weight, shape, self.groups), s, weight)

    def spread(self, s: Tensor, shape: Sequence[int]) -> Tensor:
        # All inputs of a group get the same, so one channel a group is computed and repeated.
        per_group = s.unflatten(1, (self.groups, -1)).sum(2)
        even = self._transpose(per_group, self._window, (self.groups, *shape[1:]), self.groups)
        inputs = shape[0] // self.groups
        return even.expand(-1, inputs, *shape[1:]) if self.groups == 1 else even.repeat_interleave(inputs, 1)

    def fan(self, shape: Sequence[int]) -> Tensor:
        ones = self.weight.new_ones((1, self.groups, *shape[1:]))
        seen = self._convolve(ones, self._window, None, self.groups) * (shape[0] // self.groups)
        outputs = self.weight.shape[0] // self.groups
        return seen.expand(-1, outputs, *seen.shape[2:]) if self.groups == 1 else seen.repeat_interleave(outputs, 1)

    @cached_property
    def _window(self) -> Tensor:
        return self.weight.new_ones((self.groups, 1, *self.weight.shape[2:]))

    def _convolve(self, a: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        if any(self._extra):
            a = F.pad(a, [n for extra in reversed(self._extra) for n in (0, extra)])
        none = [0] * len(self.stride)
        y: Tensor = torch.ops.aten.convolution(
            a, weight, bias, self.stride, self._padding, self.dilation, False, none, groups
        )
        return y

    def _transpose(self, s: Tensor, weight: Tensor, shape: Sequence[int], groups: int) -> Tensor:
        if self._by_phases_pays(weight, groups):
            return self._by_phases(s, weight, shape)
        padded = [n + extra for n, extra in zip(shape[1:], self._extra, strict=True)]
        none = [0] * len(self.stride)
        # The kernel asks for the input only to learn its shape: this one is never written nor read.
        layout = torch.channels_last if len(none) == 2 else torch.contiguous_format
        like = torch.empty((s.shape[0], shape[0], *padded), dtype=s.dtype, device=s.device, memory_format=layout)
        r: Tensor = torch.ops.aten.convolution_backward(
            s, like, weight, None, self.stride, self._padding, self.dilation, False, none, groups, [True, False, False]
        )[0]
        for axis, n in enumerate(shape[1:], start=2):
            r = r.narrow(axis, 0, n) if r.shape[axis] != n else r
        return r

    def _by_phases_pays(self, weight: Tensor, groups: int) -> bool:
        """Whether this is a first layer of images: strided, with so few input channels that the kernel starves."""
        same = len(self.stride) == 2 and self.stride[0] == self.stride[1] > 1
        return same and groups == 1 and self.dilation == [1, 1] and weight.shape[1] <= 4 and not any(self._extra)

    def _by_phases(self, s: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
        """The transpose as one convolution of stride one, whose channels are the pixels of each step.

        Input ``y`` sees output ``j`` through tap ``k = y + p - t j``. With ``y + p = t u + f``, only the taps
        ``f + t m`` meet phase ``f``, at ``j = u - m``: a convolution with the flipped kernel of each phase.
        """
        t = self.stride[0]
        taps = [-(-k // t) for k in weight.shape[2:]]
        over = [n * t - k for n, k in zip(taps, weight.shape[2:], strict=True)]
        phases = F.pad(weight, (0, over[1], 0, over[0])).unflatten(3, (taps[1], t)).unflatten(2, (taps[0], t))
        kernel = phases.permute(1, 3, 5, 0, 2, 4).flip(4, 5).flatten(0, 2)
        steps = F.conv2d(s, self._packed(kernel), padding=[n - 1 for n in taps])
        # What lies beyond the last window is seen by no output.
        near = [-p for p in self._padding]
        far = [n - (t * m - p) for n, m, p in zip(shape[1:], steps.shape[2:], self._padding, strict=True)]
        return F.pad(F.pixel_shuffle(steps, t), (near[1], far[1], near[0], far[0]))
