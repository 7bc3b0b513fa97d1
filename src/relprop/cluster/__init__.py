"""Clusters: the pieces of a study on the workers of a Ray cluster, with the rows that one machine would have."""

from relprop.cluster.engine import Cluster

__all__ = ["Cluster"]
