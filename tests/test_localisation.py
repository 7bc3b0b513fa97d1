import math

import numpy as np
import pytest
import torch

from relprop.errors import RelpropError
from relprop.metrics import (
    box_masks,
    effective_heat_ratio,
    energy_pointing_game,
    grid_images,
    grid_pointing_game,
    pointing_game,
    relevance_mass_accuracy,
    relevance_rank_accuracy,
)


def region(*pixels, size=(4, 5)):
    mask = torch.zeros(1, *size, dtype=torch.bool)
    for y, x in pixels:
        mask[0, y, x] = True
    return mask


def heatmap(values, size=(4, 5)):
    maps = torch.zeros(1, *size)
    for (y, x), value in values.items():
        maps[0, y, x] = value
    return maps


class TestBoxes:
    def test_by_hand(self):
        masks = box_masks([(1, 0, 3, 2), [(0, 0, 1, 1), (4, 3, 5, 4)], (0, 0, 5, 4), []], (4, 5))
        assert masks[0].nonzero().tolist() == [[0, 1], [0, 2], [1, 1], [1, 2]]
        assert masks[1].nonzero().tolist() == [[0, 0], [3, 4]]
        assert masks[2].all()
        assert not masks[3].any()

    def test_a_pixel_is_where_its_centre_is(self):
        assert box_masks([(0.6, 0, 2.4, 1)], (1, 4))[0, 0].tolist() == [False, True, False, False]

    @pytest.mark.parametrize("box", [(1, 2, 3), (3, 0, 1, 2), (0, 0, math.nan, 1), 5.0])
    def test_refuses(self, box):
        with pytest.raises(RelpropError, match="box"):
            box_masks([box], (4, 5))


class TestPointingGame:
    # The maximum is at row 1, column 1; the object two rows down and one column to the right: sqrt(5) away.
    maps, there = heatmap({(1, 1): 3.0, (3, 2): 2.0}), region((3, 2))

    @pytest.mark.parametrize(("tolerance", "hit"), [(0, 0), (2, 0), (2.2, 0), (2.3, 1), (15, 1)])
    def test_tolerance(self, tolerance, hit):
        assert pointing_game(self.maps, self.there, tolerance).tolist() == [hit]

    def test_hits_without_tolerance(self):
        assert pointing_game(self.maps, region((1, 1)), 0).tolist() == [1]

    def test_tied_maxima_share_the_point(self):
        maps = heatmap({(0, 0): 1.0, (1, 1): 1.0, (2, 2): 1.0, (3, 3): 1.0})
        assert pointing_game(maps, region((0, 0), (0, 1)), 0).tolist() == [0.25]
        assert pointing_game(torch.zeros(1, 4, 5), region((0, 0), (0, 1)), 0).tolist() == [2 / 20]

    def test_negative_maps_have_a_maximum(self):
        assert pointing_game(self.maps - 10, region((1, 1)), 0).tolist() == [1]

    def test_is_euclidean(self):
        generator = torch.Generator().manual_seed(0)
        maps, regions = torch.rand(20, 9, 9, generator=generator), torch.rand(20, 9, 9, generator=generator) > 0.97
        regions[:, 4, 4] = True
        for one, mask, hit in zip(maps, regions, pointing_game(maps, regions, 2.5), strict=True):
            point = torch.tensor(divmod(int(one.argmax()), 9))
            assert float(hit) == float((mask.nonzero() - point).double().norm(dim=1).min() <= 2.5)


class TestMass:
    def test_by_hand(self):
        maps = heatmap({(0, 0): 3.0, (0, 1): 1.0, (2, 2): 4.0, (3, 3): -5.0, (0, 2): -1.0})
        inside = region((0, 0), (0, 1), (0, 2))
        assert relevance_mass_accuracy(maps, inside).tolist() == [0.5]  # 4 of 8; what is negative counts nowhere
        assert energy_pointing_game(maps, inside).tolist() == [0.5]

    def test_nothing_positive_is_nothing(self):
        assert relevance_mass_accuracy(-torch.ones(1, 4, 5), region((0, 0))).tolist() == [0]

    def test_a_constant_map_has_the_share_of_the_area(self):
        assert relevance_mass_accuracy(torch.ones(1, 4, 5), region((0, 0), (3, 3))).tolist() == [0.1]

    def test_channels_are_summed_first(self):
        maps = torch.stack([heatmap({(0, 0): 3.0, (1, 1): 2.0}), heatmap({(0, 0): -1.0, (1, 1): -4.0})], 1)
        assert relevance_mass_accuracy(maps, region((0, 0))).tolist() == [1]


class TestRank:
    def test_by_hand(self):
        maps = heatmap({(0, 0): 5.0, (1, 1): 4.0, (2, 2): 3.0, (3, 3): 2.0})
        assert relevance_rank_accuracy(maps, region((0, 0), (2, 2), (3, 4))).tolist() == [2 / 3]

    def test_ties_share_what_is_left(self):
        # Three places: one for the highest pixel, two for the four that tie, of which one is inside.
        maps = heatmap({(0, 0): 5.0, (0, 1): 1.0, (0, 2): 1.0, (0, 3): 1.0, (0, 4): 1.0})
        inside = region((0, 0), (0, 1), (3, 3))
        assert relevance_rank_accuracy(maps, inside).tolist() == [pytest.approx((1 + 2 / 4) / 3)]

    def test_ties_are_the_mean_over_random_orders(self):
        generator = torch.Generator().manual_seed(0)
        maps = torch.randint(3, (1, 4, 5), generator=generator).double()
        inside = torch.rand(1, 4, 5, generator=generator) > 0.6
        orders = maps + 0.5 * torch.rand(4000, 4, 5, generator=generator)
        expected = relevance_rank_accuracy(orders, inside.expand(4000, -1, -1)).mean()
        assert float(relevance_rank_accuracy(maps, inside)) == pytest.approx(float(expected), abs=0.01)

    def test_order_alone_matters(self):
        maps = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
        inside = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(1)) > 0.5
        assert torch.equal(relevance_rank_accuracy(maps, inside), relevance_rank_accuracy(maps.exp(), inside))


class TestEffectiveHeatRatio:
    def test_by_hand(self):
        # Scaled: 1, 0.5 and 0.05, the last below the floor. Quantiles of {0.5, 1}: 0.5, 0.75, and 1, cut to 0.99.
        maps = heatmap({(0, 0): 2.0, (0, 1): 1.0, (0, 2): 0.1})
        # Both hot pixels reach 0.5, and 0.5 of heat is inside; one reaches 0.75 and 0.99, outside.
        assert effective_heat_ratio(maps, region((0, 1)), quantiles=3).tolist() == [pytest.approx(0.25 * 0.25)]
        # 1 of heat in 2 pixels, then 1 in 1.
        assert effective_heat_ratio(maps, region((0, 0)), quantiles=3).tolist() == [pytest.approx(0.875)]

    def test_nearly_the_highest_is_as_hot(self):
        maps = heatmap({(0, 0): 2.0, (0, 1): 1.99})
        # The quantiles 0.995, 0.9975 and 1 are all cut to 0.99, which both reach.
        assert effective_heat_ratio(maps, region((0, 0)), quantiles=3).tolist() == [pytest.approx(0.5)]

    def test_is_the_definition(self):
        generator = torch.Generator().manual_seed(0)
        maps, regions = torch.randn(4, 8, 9, generator=generator), torch.rand(4, 8, 9, generator=generator) > 0.5
        for one, inside, found in zip(maps.numpy(), regions.numpy(), effective_heat_ratio(maps, regions), strict=True):
            heat = np.maximum(one.astype(np.float64), 0)
            heat /= heat.max()
            ratios = []
            for q in np.linspace(0, 1, 11):
                reached = heat >= min(np.quantile(heat[heat >= 0.1], q), 0.99)
                ratios.append(heat[reached & inside].sum() / reached.sum())
            assert float(found) == pytest.approx(np.trapezoid(ratios, np.linspace(0, 1, 11)))

    def test_bounds(self):
        maps = torch.rand(2, 4, 5)
        everywhere = effective_heat_ratio(torch.ones(1, 4, 5), torch.ones(1, 4, 5, dtype=torch.bool))
        assert everywhere.tolist() == [pytest.approx(1)]
        assert effective_heat_ratio(-maps, torch.ones(2, 4, 5, dtype=torch.bool)).tolist() == [0, 0]
        with pytest.raises(RelpropError, match="floor"):
            effective_heat_ratio(maps, torch.ones(2, 4, 5, dtype=torch.bool), floor=0)


class TestGrid:
    def test_images_lie_row_by_row(self):
        x = torch.arange(8.0).reshape(8, 1, 1, 1).expand(8, 3, 2, 4)
        grids = grid_images(x, 2)
        assert grids.shape == (2, 3, 4, 8)
        assert grids[0, 0, ::2, ::4].tolist() == [[0, 1], [2, 3]]
        assert grids[1, 2, 1::2, 3::4].tolist() == [[4, 5], [6, 7]]

    def test_by_hand(self):
        maps = torch.zeros(2, 4, 6)
        maps[:, 0, 0], maps[:, 3, 5], maps[:, 2, 4], maps[:, 1, 1] = 1.0, 2.0, 1.0, -7.0
        assert grid_pointing_game(maps, [0, 3], size=2).tolist() == [0.25, 0.75]
        assert grid_pointing_game(maps, 1, size=2).tolist() == [0, 0]
        assert grid_pointing_game(torch.ones(1, 6, 6), 4, size=3).tolist() == [pytest.approx(1 / 9)]

    def test_refuses(self):
        with pytest.raises(RelpropError, match="multiples of 9"):
            grid_images(torch.zeros(8, 3, 2, 2))
        with pytest.raises(RelpropError, match="no squares of 3x3"):
            grid_pointing_game(torch.zeros(1, 4, 4), 0)
        for cells in (4, [0, 1], -1):
            with pytest.raises(RelpropError, match="are 0 to 3"):
                grid_pointing_game(torch.zeros(1, 4, 4), cells, size=2)


@pytest.mark.parametrize(
    ("message", "maps", "regions"),
    [
        ("regions are float32", torch.zeros(1, 4, 5), torch.zeros(1, 4, 5)),
        ("booleans", torch.zeros(1, 4, 5), torch.zeros(4, 5, dtype=torch.bool)),
        ("maps have shape", torch.zeros(1, 4, 4), region((0, 0))),
        ("no order", torch.full((1, 4, 5), math.nan), region((0, 0))),
        ("region of sample 0 is empty", torch.zeros(1, 4, 5), region()),
    ],
)
@pytest.mark.parametrize(
    "measure", [pointing_game, relevance_mass_accuracy, relevance_rank_accuracy, effective_heat_ratio]
)
def test_bad_input_gets_one_sentence(measure, message, maps, regions):
    with pytest.raises(RelpropError, match=message):
        measure(maps, regions)


def test_negative_tolerance():
    with pytest.raises(RelpropError, match="tolerance is -1"):
        pointing_game(torch.zeros(1, 4, 5), region((0, 0)), -1)
