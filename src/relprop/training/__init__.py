"""Training: a network on photos of your own or on CUB-200-2011, so that there is something to explain.

``Training(model, parts, out, devices())(seed)`` does what ``relprop train`` does.
"""

from relprop.training.damage import Finding, birds, refuse, unreadable
from relprop.training.parts import Parts, open_birds, open_folder
from relprop.training.recipe import Recipe
from relprop.training.run import Outcome, Training, devices, tabulate

__all__ = [
    "Finding",
    "Outcome",
    "Parts",
    "Recipe",
    "Training",
    "birds",
    "devices",
    "open_birds",
    "open_folder",
    "refuse",
    "tabulate",
    "unreadable",
]
