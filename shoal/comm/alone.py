"""Any rank of a world of any size, with nobody else there: its collectives are counted, and move nothing."""

from __future__ import annotations

from torch import Tensor

from shoal.comm.backends import Backend
from shoal.comm.backends.counting import Counting, Tell
from shoal.comm.world import World


def _nothing(_: Tensor) -> None:
    pass


class Alone(World):
    """Rank ``rank`` of ``size``, on the CPU. See :class:`~shoal.comm.backends.counting.Counting` for ``sent`` and
    ``wanted``."""

    def __init__(self, rank: int, size: int, *, sent: Tell = _nothing, wanted: Tell = _nothing) -> None:
        super().__init__()
        self.rank, self.size, self.carrier = rank, size, "nobody"
        self._sent, self._wanted = sent, wanted

    def _connect(self, ranks: tuple[int, ...], channel: str) -> Backend:
        return Counting(self._sent, self._wanted)
