import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from relprop.errors import RelpropError
from relprop.heatmap import colorize, heat_quantization, overlay, save_png

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EDGES = ["paper", "released"]

finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
finite64 = st.floats(allow_nan=False, allow_infinity=False)


def bits(tensor):
    """What a tensor is made of, so that -0.0 and 0.0 differ."""
    return tensor.contiguous().view(torch.uint8).tolist()


def pixels(path):
    with Image.open(path) as png:
        return np.asarray(png)


class TestHeatQuantization:
    @pytest.mark.parametrize(
        ("edges", "expected"),
        [
            # width 7 / 8 = 0.875: edges 0, 0.875, 1.75, 2.625, 3.5, 4.375, 5.25, 6.125, 7
            ("paper", [[0.0, 0.875, 1.75], [2.625, 3.5, 6.125], [6.125, 6.125, 7.0]]),
            # width 7 / 7 = 1
            ("released", [[0.0, 1.0, 2.0], [3.0, 4.0, 6.0], [6.0, 6.0, 7.0]]),
        ],
    )
    def test_by_hand(self, edges, expected):
        heat = torch.tensor([[0.0, 1.0, 2.5], [3.0, 4.25, 6.5], [6.75, 6.999, 7.0]])
        assert heat_quantization(heat, edges=edges).tolist() == expected

    @pytest.mark.parametrize("edges", EDGES)
    @given(
        values=st.lists(st.integers(0, 10_000), min_size=1, max_size=40),
        low=st.integers(-1000, 1000),
        levels=st.integers(2, 20),
        width=st.integers(1, 500),
    )
    def test_is_the_formula_in_exact_arithmetic(self, edges, values, low, levels, width):
        steps = levels if edges == "paper" else levels - 1
        top = steps * width
        exact = [0, top, *(value % (top + 1) for value in values)]
        heat = torch.tensor(exact, dtype=torch.float32) + low
        assert heat_quantization(heat, levels, edges, dims=1).tolist() == [low + v // width * width for v in exact]

    @pytest.mark.parametrize(("edges", "count"), [("paper", 9), ("released", 8)])
    def test_number_of_values(self, edges, count):
        heat = torch.linspace(-0.3, 1.7, 50 * 50).reshape(50, 50)
        assert len(heat_quantization(heat, edges=edges).unique()) == count

    def test_released_edges_are_a_linspace(self):
        heat = torch.linspace(-0.3, 1.7, 50 * 50).reshape(50, 50)
        values = heat_quantization(heat, edges="released").unique()
        torch.testing.assert_close(values, torch.linspace(-0.3, 1.7, 8))

    @pytest.mark.parametrize("edges", EDGES)
    @pytest.mark.parametrize("dtype", DTYPES)
    @given(values=st.lists(finite64, min_size=1, max_size=30), levels=st.integers(2, 300))
    def test_of_any_range(self, edges, dtype, values, levels):
        top = torch.finfo(dtype).max
        heat = torch.tensor(values, dtype=torch.float64).clamp(-top, top).to(dtype)
        before = bits(heat)
        result = heat_quantization(heat, levels, edges, dims=1)
        assert bits(heat) == before
        assert result.dtype == dtype
        assert result.isfinite().all()
        assert (result <= heat).all()
        assert result[heat.argmax()] == heat.max()
        assert result.min() == heat.min()
        assert len(result.unique()) <= levels + (edges == "paper")
        order = heat.argsort()
        assert (result[order][1:] >= result[order][:-1]).all()
        assert (heat_quantization(result, levels, edges, dims=1) == result).all()

    @pytest.mark.parametrize("edges", EDGES)
    @given(values=st.lists(finite32, min_size=2, max_size=30), levels=st.integers(2, 20))
    def test_drops_by_less_than_a_bin(self, edges, values, levels):
        heat = torch.tensor(values, dtype=torch.float32)
        drop = heat.double() - heat_quantization(heat, levels, edges, dims=1).double()
        width = (heat.max().double() - heat.min().double()) / (levels if edges == "paper" else levels - 1)
        rounding = heat.abs().max().double() * 2.0**-23 + 2.0**-149
        assert drop.max() <= width + rounding

    @pytest.mark.parametrize("scale", [2.0**-149, 2.0**-126, 1e-20, 1.0, 1e20, 4e37])
    def test_extreme_float32_ranges(self, scale):
        base = torch.tensor([[-8.0, -3.0], [0.0, 8.0]])
        heat = (base.double() * scale).float()
        expected = (torch.tensor([[-8.0, -4.0], [0.0, 8.0]], dtype=torch.float64) * scale).float()
        torch.testing.assert_close(heat_quantization(heat), expected, rtol=1e-6, atol=0.0)

    def test_a_range_beyond_float64(self):
        big = torch.finfo(torch.float64).max
        heat = torch.tensor([-big, -0.6 * big, 1e-300, 0.3 * big, big], dtype=torch.float64)
        expected = torch.tensor([-big, -0.75 * big, 0.0, 0.25 * big, big], dtype=torch.float64)
        torch.testing.assert_close(heat_quantization(heat, dims=1), expected, rtol=1e-12, atol=1e280)

    @pytest.mark.parametrize("dtype", DTYPES)
    @given(value=st.floats(-6e4, 6e4), levels=st.integers(2, 40))
    def test_constant_map_is_unchanged_bit_for_bit(self, dtype, value, levels):
        heat = torch.full((3, 4), value, dtype=dtype)
        assert bits(heat_quantization(heat, levels)) == bits(heat)

    def test_signed_zeros_are_constant_too(self):
        heat = torch.tensor([[0.0, -0.0], [-0.0, 0.0]])
        assert bits(heat_quantization(heat)) == bits(heat)

    @pytest.mark.parametrize("dims", [1, 2, 3])
    def test_batch_is_each_map_on_its_own(self, dims):
        maps = torch.randn(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
        maps[1, 2] = 0.25
        front = maps.shape[: maps.dim() - dims]
        result = heat_quantization(maps, dims=dims)
        assert result.shape == maps.shape
        for index in np.ndindex(*front):
            assert (result[index] == heat_quantization(maps[index], dims=dims)).all()

    def test_non_contiguous_and_grad_requiring_maps(self):
        maps = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
        turned = maps.permute(1, 2, 0)
        result = heat_quantization(turned)
        assert (result == heat_quantization(turned.detach().clone().contiguous())).all()
        assert not result.requires_grad

    def test_result_is_no_view_of_the_input(self):
        heat = torch.ones(3, 3)
        heat_quantization(heat)[0, 0] = 7.0
        assert heat[0, 0] == 1.0

    @pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4)])
    def test_empty(self, shape):
        assert heat_quantization(torch.ones(shape)).shape == shape

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"maps": torch.tensor([[0.0, math.nan]])}, "NaN"),
            ({"maps": torch.tensor([[0.0, math.inf]])}, "infinite"),
            ({"maps": torch.ones(2, 2, dtype=torch.int64)}, "int64"),
            ({"maps": torch.ones(2, 2, dtype=torch.complex64)}, "complex64"),
            ({"maps": np.ones((2, 2))}, "ndarray"),
            ({"maps": torch.ones(4)}, "1 axes"),
            ({"maps": torch.ones(2, 2), "dims": 0}, "not 0"),
            ({"maps": torch.ones(2, 2), "levels": 1}, "at least 2"),
            ({"maps": torch.ones(2, 2), "levels": 8.0}, r"not 8\.0"),
            ({"maps": torch.ones(2, 2), "edges": "linspace"}, "linspace"),
        ],
    )
    def test_refuses(self, arguments, words):
        with pytest.raises(RelpropError, match=words):
            heat_quantization(**arguments)


class TestColorize:
    def test_signs_have_their_colours(self):
        rgb = colorize(torch.tensor([[-1.0, 0.0, 0.5]])).astype(int)
        assert rgb.shape == (1, 3, 3)
        (nr, _, nb), zero, (pr, _, pb) = rgb[0]
        assert nb > nr + 50
        assert pr > pb + 50
        assert zero.min() > 240

    def test_symmetric_around_zero(self):
        positions = torch.linspace(-1, 1, 11)
        scaled = colorize(torch.cat([positions * 3e-5, torch.tensor([-6e-5])]))
        alone = colorize(torch.cat([positions / 2, torch.tensor([-1.0])]))
        assert (scaled == alone).all()

    def test_without_negatives_from_black_to_bright(self):
        rgb = colorize(torch.tensor([[0.0, 1.0, 2.0]])).astype(int)[0]
        assert rgb[0].sum() < 10
        assert rgb[0].sum() < rgb[1].sum() < rgb[2].sum()
        assert rgb[2].min() > 150

    def test_a_constant_offset_is_not_black(self):
        assert colorize(torch.full((2, 2), 3.0)).min() > 150

    def test_zeros(self):
        assert colorize(torch.zeros(2, 3)).max() < 10

    def test_limit_makes_maps_comparable_and_clips(self):
        weak, strong = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 4.0, 9.0]])
        assert (colorize(weak, limit=4.0)[0, 1] == colorize(torch.tensor([[1.0, 4.0]]))[0, 0]).all()
        assert (colorize(strong, limit=4.0)[0, 1] == colorize(strong, limit=4.0)[0, 2]).all()

    def test_diverging_colours_keep_zero_in_the_middle(self):
        assert colorize(torch.tensor([[0.0, 1.0]]), cmap="RdBu_r")[0, 0].min() > 240

    def test_colour_map_by_name_and_by_object(self):
        import matplotlib

        heat = torch.tensor([[0.0, 1.0]])
        by_name = colorize(heat, cmap="viridis")
        assert (by_name == colorize(heat, cmap=matplotlib.colormaps["viridis"])).all()
        assert by_name[0, 1].tolist() == [253, 231, 36]

    @given(values=st.lists(finite64, min_size=1, max_size=20), limit=st.none() | st.floats(5e-324, 1.7e308))
    def test_any_range_keeps_its_signs(self, values, limit):
        heat = torch.tensor(values, dtype=torch.float64)
        red, _, blue = colorize(heat, cmap="RdBu_r", limit=limit)[0].astype(int).T
        middle = colorize(torch.zeros(1, 1), cmap="RdBu_r").astype(int)[0, 0]
        strength = heat / (limit or heat.abs().max().item() or 1.0)
        assert (red - blue)[(strength > 0.3).numpy()].min(initial=255) > 20
        assert (blue - red)[(strength < -0.3).numpy()].min(initial=255) > 20
        assert (red[heat.numpy() == 0] == middle[0]).all()

    def test_a_line_is_a_strip(self):
        rgb = colorize(torch.tensor([0.0, 1.0, -1.0]))
        assert rgb.shape[1:] == (3, 3)
        assert rgb.shape[0] > 1
        assert (rgb == rgb[:1]).all()

    @pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.bool])
    def test_dtypes(self, dtype):
        heat = torch.tensor([[0, 1]]).to(dtype)
        assert (colorize(heat) == colorize(np.array([[0.0, 1.0]]))).all()

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"map": torch.ones(2, 3, 4)}, r"\(2, 3, 4\)"),
            ({"map": torch.tensor(1.0)}, r"shape \(\)"),
            ({"map": torch.ones(0, 3)}, r"\(0, 3\)"),
            ({"map": torch.tensor([[math.nan]])}, "NaN"),
            ({"map": torch.ones(2, 2, dtype=torch.complex64)}, "complex"),
            ({"map": np.ones((2, 2), dtype=complex)}, "complex"),
            ({"map": torch.ones(2, 2), "cmap": "no such"}, "no such"),
            ({"map": torch.ones(2, 2), "limit": 0.0}, "limit"),
            ({"map": torch.ones(2, 2), "limit": math.nan}, "limit"),
        ],
    )
    def test_refuses(self, arguments, words):
        with pytest.raises(RelpropError, match=words):
            colorize(**arguments)


class TestOverlay:
    MAP = torch.tensor([[0.0, 1.0], [-1.0, 0.5]])
    ARRAY = np.array([[[200, 0, 0], [0, 200, 0]], [[0, 0, 200], [9, 99, 199]]], dtype=np.uint8)

    def test_opacity_one_is_the_heat_and_zero_the_image(self):
        assert (overlay(self.MAP, self.ARRAY, opacity=1.0) == colorize(self.MAP)).all()
        assert (overlay(self.MAP, self.ARRAY, opacity=0.0, grey=False) == self.ARRAY).all()

    def test_mixes(self):
        mixed = overlay(self.MAP, self.ARRAY, opacity=0.25, grey=False)
        expected = 0.25 * colorize(self.MAP).astype(float) + 0.75 * self.ARRAY
        assert np.abs(mixed - expected).max() <= 0.5

    def test_grey_takes_the_colours_away(self):
        grey = overlay(self.MAP, self.ARRAY, opacity=0.0)
        assert (grey == grey[..., :1]).all()
        assert abs(int(grey[0, 1, 0]) - 0.587 * 200) <= 1  # ITU-R 601 luma of pure green
        assert grey[0, 1, 0] > grey[0, 0, 0] > grey[1, 0, 0]

    def test_kinds_of_image_agree(self):
        plain = overlay(self.MAP, self.ARRAY, grey=False)
        tensor = torch.from_numpy(self.ARRAY).permute(2, 0, 1).float() / 255
        for image in (
            Image.fromarray(self.ARRAY),
            Image.fromarray(self.ARRAY).convert("RGBA"),
            tensor,
            tensor.double(),
        ):
            assert (overlay(self.MAP, image, grey=False) == plain).all()

    def test_image_is_resized_to_the_map(self):
        image = Image.new("RGB", (40, 20), (255, 0, 0))
        image.paste((0, 0, 255), (20, 0, 40, 20))
        result = overlay(torch.zeros(10, 30), image, opacity=0.0, grey=False)
        assert result.shape == (10, 30, 3)
        assert result[5, 2].tolist() == [255, 0, 0]
        assert result[5, 27].tolist() == [0, 0, 255]

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"image": torch.full((3, 2, 2), 2.0)}, "normalization"),
            ({"image": torch.full((3, 2, 2), math.nan)}, "normalization"),
            ({"image": torch.zeros(3, 2, 2, dtype=torch.uint8)}, "uint8"),
            ({"image": np.zeros((2, 2, 3))}, "float64"),
            ({"image": np.zeros((3, 2, 2), dtype=np.uint8)}, r"\(3, 2, 2\)"),
            ({"image": "photo.jpg"}, "str"),
            ({"image": ARRAY, "opacity": 1.5}, "opacity"),
            ({"image": ARRAY, "map": torch.ones(4)}, r"\(4,\)"),
        ],
    )
    def test_refuses(self, arguments, words):
        with pytest.raises(RelpropError, match=words):
            overlay(**{"map": self.MAP, **arguments})


class TestSavePng:
    MAP = torch.linspace(-1, 1, 12).reshape(3, 4)

    def test_pixels_are_the_colours(self, tmp_path):
        path = save_png(self.MAP, tmp_path / "deep" / "er" / "map.png")
        with Image.open(path) as png:
            assert (png.format, png.mode, png.size) == ("PNG", "RGB", (4, 3))
            assert (np.asarray(png) == colorize(self.MAP)).all()

    def test_over_an_image(self, tmp_path):
        image = Image.new("RGB", (8, 6), (10, 200, 90))
        path = save_png(self.MAP, str(tmp_path / "map.PNG"), image, opacity=0.3, grey=False, cmap="bwr", limit=2.0)
        expected = overlay(self.MAP, image, 0.3, grey=False, cmap="bwr", limit=2.0)
        assert (pixels(path) == expected).all()

    @pytest.mark.parametrize("shape", [(300, 260), (7, 7), (5000,), (12,)])
    def test_colour_bar(self, tmp_path, shape):
        heat = torch.linspace(-2, 3, math.prod(shape)).reshape(shape)
        plain = colorize(heat)
        sheet = pixels(save_png(heat, tmp_path / "map.png", colorbar=True)).astype(int)
        zoom = max(1, 256 // max(plain.shape[:2]))
        height, width = plain.shape[0] * zoom, plain.shape[1] * zoom
        top = (sheet.shape[0] - height) // 2
        found = sheet[top : top + height, 12 : 12 + width]
        assert (found == plain.repeat(zoom, 0).repeat(zoom, 1)).all()
        beside = sheet[:, 12 + width + 12 :]
        bar = beside[:, 8]  # the middle of the bar, from its top edge to its bottom edge
        reds, blues = bar[..., 0] - bar[..., 2] > 60, bar[..., 2] - bar[..., 0] > 60
        assert reds.any()
        assert blues.any()
        assert np.flatnonzero(reds).max() < np.flatnonzero(blues).min()
        ink = (beside[:, 24:] < 100).all(-1)
        assert ink.sum() > 50  # tick labels
        assert not ink[:, -1].any()  # and none is cut off

    @pytest.mark.parametrize("scale", [5e-324, 1e-38, 1e38, 1e308])
    def test_colour_bar_of_extreme_ranges(self, tmp_path, scale):
        path = save_png(torch.tensor([[-1.0, 1.0]], dtype=torch.float64) * scale, tmp_path / "map.png", colorbar=True)
        assert pixels(path)[76, [12, 267]].tolist() == colorize(torch.tensor([[-1.0, 1.0]]))[0].tolist()

    def test_labels_say_the_values(self, tmp_path):
        one, two, same = (
            pixels(save_png(heat, tmp_path / "map.png", colorbar=True, limit=limit))[:, -72:]
            for heat, limit in ((self.MAP, 1.0), (self.MAP, 7.0), (self.MAP / 2, 1.0))
        )
        assert (one != two).any()
        assert (one == same).all()

    def test_replaces_a_file(self, tmp_path):
        path = save_png(self.MAP, tmp_path / "map.png")
        before = path.read_bytes()
        save_png(-self.MAP, path)
        assert path.read_bytes() != before
        assert (pixels(path) == colorize(-self.MAP)).all()

    def test_whoever_reads_the_old_file_reads_it_to_the_end(self, tmp_path):
        path = save_png(self.MAP, tmp_path / "map.png")
        before = path.read_bytes()
        with path.open("rb") as reading:
            save_png(-self.MAP, path)
            assert reading.read() == before

    def test_a_refusal_leaves_the_file_as_it_was(self, tmp_path):
        path = save_png(self.MAP, tmp_path / "map.png")
        before = path.read_bytes()
        with pytest.raises(RelpropError):
            save_png(self.MAP, path, torch.full((3, 3, 4), 9.0))
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["map.png"]

    def test_a_failed_write_leaves_nothing(self, tmp_path):
        (tmp_path / "map.png").mkdir()
        with pytest.raises(OSError, match=r"map\.png"):
            save_png(self.MAP, tmp_path / "map.png")
        assert [p.name for p in tmp_path.iterdir()] == ["map.png"]

    def test_ordinary_permissions(self, tmp_path):
        ordinary = tmp_path / "ordinary"
        ordinary.touch()
        assert save_png(self.MAP, tmp_path / "map.png").stat().st_mode == ordinary.stat().st_mode

    @pytest.mark.parametrize(("name", "heat"), [("map.jpg", MAP), ("map.png", torch.ones(2, 3, 4))])
    def test_refuses(self, tmp_path, name, heat):
        with pytest.raises(RelpropError, match=r"map\.jpg|\(2, 3, 4\)"):
            save_png(heat, tmp_path / name)
        assert not list(tmp_path.iterdir())


def test_painting_is_imported_late_and_pyplot_never(tmp_path: Path):
    code = f"""
import sys
import relprop.heatmap, torch
assert "matplotlib" not in sys.modules, "imported before anything is painted"
relprop.heatmap.save_png(torch.ones(4, 4), {str(tmp_path / "map.png")!r}, colorbar=True)
assert "matplotlib" in sys.modules
assert "matplotlib.pyplot" not in sys.modules, "global state"
"""
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
