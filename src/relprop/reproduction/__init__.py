"""The paper, reproduced: its tables and figures (Otsuki et al., 2024), as published and where ties cannot help."""

from relprop.reproduction.claims import CLAIMS, Claim, Line
from relprop.reproduction.tables import measure, tabulate

__all__ = ["CLAIMS", "Claim", "Line", "measure", "tabulate"]
