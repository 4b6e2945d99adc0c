"""What collectives take among ranks that lie in one node or in several.

Where a group leaves the node, its ranks there use all of their network cards together: its bandwidth is that of the
links inside, or of as many cards as it has ranks in a node, whichever is less (hierarchical rings, as NCCL builds
them). The latency is that of a ring for gathers and reduce-scatters, and for all-reduces of a ring or a tree.
"""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple

from shoal.plan.hardware import Cluster
from shoal.plan.kernels import family_of
from shoal.plan.profile import Constants


class Group(NamedTuple):
    """Ranks that communicate: how many, and how many of them share a node."""

    size: int
    inside: int

    @property
    def nodes(self) -> int:
        return ceil(self.size / self.inside)


class Network:
    """Seconds of collectives. Bytes are those of the whole tensor, divided or replicated."""

    def __init__(self, cluster: Cluster, constants: Constants) -> None:
        self._per_node = cluster.per_node
        self._link = cluster.device.link * 1e9 * constants[f"link.{family_of(cluster.device)}"]
        self._nic = cluster.nic * 1e9 * constants["nic.efficiency"]
        self._near = constants["latency.inside"] * 1e-6
        self._far = constants["latency.outside"] * 1e-6
        self._hop = constants["latency.hop"] * 1e-6
        self._ramp = constants["link.ramp"] * 1e6

    def group(self, size: int, stride: int) -> Group:
        """``size`` ranks, each ``stride`` after the one before."""
        return Group(size, max(1, min(size, self._per_node // stride)))

    def rate(self, group: Group) -> float:
        """Bytes a second through each rank of a ring."""
        return self._link if group.nodes == 1 else min(self._link, self._nic * group.inside)

    def gather(self, amount: float, group: Group) -> float:
        """All-gather, or reduce-scatter, of ``amount`` bytes altogether."""
        if group.size == 1:
            return 0.0
        base = self._near
        if group.nodes > 1:
            # A ring, or from many ranks on exchanges in a logarithmic number of steps (NCCL's PAT).
            base = self._far + min(self._hop * (group.size - 1), self._far * log2(group.size))
        return base + self._flow(amount * (group.size - 1) / group.size, group)

    def all_reduce(self, amount: float, group: Group) -> float:
        """A ring, or a tree where its fewer steps make up for its bandwidth."""
        if group.size == 1:
            return 0.0
        ring = 2.0 * self.gather(amount, group)
        tree = 2.0 * (self._near + self._far * log2(max(group.nodes, 1))) + 1.6 * self._flow(2 * amount, group)
        return min(ring, tree)

    def all_to_all(self, amount: float, group: Group, copies: int = 1) -> float:
        """Each rank sends ``amount`` bytes, an equal part to each of the others.

        Of what goes out in so many ``copies``, to as many ranks drawn at random, each node is sent one (DeepEP)."""
        if group.size == 1:
            return 0.0
        nodes = group.nodes
        far = _distinct(nodes, copies) * (nodes - 1) / nodes if copies > 1 else (group.size - group.inside) / group.size
        near = (group.inside - 1) / group.size if copies == 1 else _distinct(group.size, copies)
        inside, outside = amount * near, amount * far
        if group.nodes == 1:
            return self._near + (inside + self._ramp) / self._link
        return self._far + self._hop * group.nodes + max(inside / self._link, (outside + self._ramp) / self._nic)

    def send(self, amount: float, stride: int) -> float:
        """From one pipeline stage to the next, whose rank is ``stride`` further on."""
        far = stride >= self._per_node
        rate = min(self._link, self._nic) if far else self._link
        return (self._far if far else self._near) + (amount + self._ramp) / rate

    def _flow(self, amount: float, group: Group) -> float:
        return (amount + self._ramp) / self.rate(group)


def _distinct(places: int, copies: int) -> float:
    """Of ``copies`` that go to places drawn at random, the share that meets a place for the first time."""
    return places * (1 - (1 - 1 / places) ** copies) / copies
