"""Studies: methods x images x metrics, one row each, resumable."""

from relprop.study.journal import Journal, Row
from relprop.study.run import Study, evaluate
from relprop.study.table import Table, estimate, tabulate

__all__ = ["Journal", "Row", "Study", "Table", "estimate", "evaluate", "tabulate"]
