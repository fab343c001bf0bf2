"""What steps of serving cost: time, memory, and what follows for latency and throughput.

The same machinery as for training (operations, wires, collectives, rules of what hides), for one forward pass that
reads caches. Not here: which layout is best (`planning`), nor requests over time (`simulation`).
"""

__all__: list[str] = []
