"""meshwise: the best way to split a large language model over the chips of a cluster, and why."""

__version__ = "0.1.0"
