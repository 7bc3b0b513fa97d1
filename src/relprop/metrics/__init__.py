"""Measures of heatmaps: insertion and deletion, localisation, and sanity."""

from relprop.metrics.curves import Curve, Curves
from relprop.metrics.insertion import InsertionDeletion, Scores, insertion_deletion
from relprop.metrics.localisation import (
    box_masks,
    effective_heat_ratio,
    energy_pointing_game,
    grid_images,
    grid_pointing_game,
    pointing_game,
    relevance_mass_accuracy,
    relevance_rank_accuracy,
)
from relprop.metrics.road import road
from relprop.metrics.sanity import (
    class_sensitivity,
    conservation_error,
    max_sensitivity,
    parameter_randomisation,
    similarity,
    sparseness,
)
from relprop.metrics.scorer import Scorer

__all__ = [
    "Curve",
    "Curves",
    "InsertionDeletion",
    "Scorer",
    "Scores",
    "box_masks",
    "class_sensitivity",
    "conservation_error",
    "effective_heat_ratio",
    "energy_pointing_game",
    "grid_images",
    "grid_pointing_game",
    "insertion_deletion",
    "max_sensitivity",
    "parameter_randomisation",
    "pointing_game",
    "relevance_mass_accuracy",
    "relevance_rank_accuracy",
    "road",
    "similarity",
    "sparseness",
]
