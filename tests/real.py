"""Real weights, fetched into the real cache the first time that a machine runs the tests."""

import pytest

import relprop
from relprop.fetching import UnavailableError


def load(name: str, weights: str = "auto") -> relprop.Model:
    """A model with real weights; where they are neither cached nor within reach, what needs them is skipped."""
    try:
        return relprop.load(name, weights)
    except UnavailableError as error:
        pytest.skip(f"real weights cannot be had here: {error}")
