"""What is simulated: replicas, their schedulers' limits, and how requests are shared out.

Values only; `replica` and `fleet` act on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.costs.engine import EngineCosts
from meshwise.scheduling import Scheduling
from meshwise.scheduling.routing import ROUTINGS

#: Replicas in one simulation: one on each chip of the largest clusters; 8 kB each.
MOST_REPLICAS = 100_000


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """Replicas that only prefill, and send the cache to those that decode.

    Args:
        costs: of their steps; `transfer_bytes_per_s` is what one of them sends at.
        replicas: how many.
        scheduling: what their schedulers are told.
    """

    costs: EngineCosts
    replicas: int
    scheduling: Scheduling = field(default_factory=Scheduling)

    def __post_init__(self) -> None:
        """Check that there are some, and that they can send."""
        _check_replicas("prefill replicas", self.replicas)
        self.costs.transfer_seconds(1)


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """The number of replicas follows the number of requests that are not done.

    Every `interval_s` there are to be as many replicas as make `requests_per_replica` of them, rounded up. New ones
    take their time to begin; those to go finish what they have.

    Args:
        requests_per_replica: the target.
        least, most: replicas.
        interval_s: seconds between decisions.
        startup_s: seconds until a new replica takes requests.
    """

    requests_per_replica: float
    least: int = 1
    most: int = 64
    interval_s: float = 10.0
    startup_s: float = 60.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check_replicas("autoscaling: least replicas", self.least)
        _check_replicas("autoscaling: most replicas", self.most)
        if self.most < self.least:
            raise MeshwiseError(f"autoscaling: expected at least {self.least} replicas at most, found {self.most}")
        if self.requests_per_replica <= 0 or self.interval_s <= 0 or self.startup_s < 0:
            raise MeshwiseError(
                "autoscaling: expected requests_per_replica and interval_s above 0 and startup_s of 0 or more, found "
                f"{self.requests_per_replica!r}, {self.interval_s!r} and {self.startup_s!r}"
            )


@dataclass(frozen=True, slots=True)
class ServingSystem:
    """What serves.

    Args:
        costs: of a step of a replica.
        replicas: how many; with autoscaling, at first.
        scheduling: what their schedulers are told.
        routing: one of `ROUTINGS`.
        prefill: replicas that prefill for them; None: they prefill themselves.
        autoscaling: what changes the number of replicas.
    """

    costs: EngineCosts
    replicas: int = 1
    scheduling: Scheduling = field(default_factory=Scheduling)
    routing: str = "round-robin"
    prefill: PrefillPool | None = None
    autoscaling: Autoscaling | None = None

    def __post_init__(self) -> None:
        """Check that the parts go together."""
        _check_replicas("replicas", self.replicas)
        if self.routing not in ROUTINGS:
            raise UnknownNameError("routing", self.routing, ROUTINGS, list_all=True)
        if self.scheduling.preemption == "swap":
            self.costs.swap_seconds(1)
        scaling = self.autoscaling
        if scaling is not None and not scaling.least <= self.replicas <= scaling.most:
            raise MeshwiseError(
                f"replicas: expected {scaling.least} to {scaling.most}, as autoscaling says, found {self.replicas}"
            )
        speculation = None if self.prefill is None else self.prefill.scheduling.speculation
        if speculation is not None:
            raise MeshwiseError("prefill replicas decode nothing: leave their speculation out")

    @property
    def independent(self) -> bool:
        """Whether what a replica does depends on its own requests alone, and which those are on nobody's state."""
        return self.routing == "round-robin" and self.prefill is None and self.autoscaling is None

    @property
    def num_chips(self) -> int:
        """Chips of all replicas; with autoscaling, at first."""
        others = 0 if self.prefill is None else self.prefill.replicas * self.prefill.costs.num_chips
        return self.replicas * self.costs.num_chips + others


def _check_replicas(what: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise MeshwiseError(f"{what}: expected a whole number, at least 1, found {count!r}")
    if count > MOST_REPLICAS:
        raise MeshwiseError(f"{what}: expected at most {MOST_REPLICAS:,}, found {count:,}; simulate a part of the load")
