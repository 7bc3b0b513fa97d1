"""Studies: methods x images x metrics, one row each, resumable."""

from relprop.study.journal import Journal, Row
from relprop.study.merge import merge
from relprop.study.output import read
from relprop.study.progress import Progress
from relprop.study.run import Study, evaluate
from relprop.study.table import Table, estimate, tabulate

__all__ = ["Journal", "Progress", "Row", "Study", "Table", "estimate", "evaluate", "merge", "read", "tabulate"]
