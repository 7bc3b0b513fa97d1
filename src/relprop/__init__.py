"""Layer-wise Relevance Propagation for residual networks that always adds up."""

from relprop.engine import explain, plan
from relprop.errors import RelpropError
from relprop.heatmap import heat_quantization
from relprop.lrp import LRP
from relprop.result import Explanation

__all__ = ["LRP", "Explanation", "RelpropError", "explain", "heat_quantization", "plan"]
__version__ = "0.1.0"
