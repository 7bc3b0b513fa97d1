"""What is said when something cannot be done."""

__all__ = ["RelpropError"]


class RelpropError(ValueError):
    """A request that cannot be met; the message is one sentence that names the thing and the remedy."""
