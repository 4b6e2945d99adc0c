"""The kinds a layout can name and the sizes each admits: facts about numbers, without a layout or a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt, log, prod

ZERO_STAGES = (0, 1, 2, 3)
SYNCS = ("allreduce", "server")
REDUCES = ("mean", "sum", "max")
TENSOR_KINDS = ("1d", "1d-sp", "2d", "2.5d", "3d", "AxBxC")
TENSOR_FORMS = ("gather", "loop")
SUMMA_KINDS = ("2d", "2.5d")
CONTEXT_KINDS = ("ring", "ulysses", "gather", "UxR")
RECOMPUTES = ("none", "selective", "full")
OFFLOAD_WHATS = ("optimizer", "params", "grads", "activations")
OFFLOAD_WHERES = ("cpu", "nvme")
DTYPES = ("float64", "float32", "bf16", "fp16")
HALVES = ("bf16", "fp16")

Grid = tuple[int, ...]
Times = tuple[float, ...]


def tensor_grid(size: int, kind: str, given: Grid = ()) -> Grid | None:
    """The grid of ``size`` ranks under a tensor-parallel kind, or None where there is none.

    1d → (P,), 2d → (q, q), 2.5d → (q, q, d), 3d → (q, q, q), AxBxC → (a, b, c). ``given`` is a grid the user
    asked for, which must have that shape. 2.5d without a depth takes the largest d that is at most q, the
    regime of Tesseract (Wang et al., 2105.14500): 4 → (2, 2, 1), 8 → (2, 2, 2), 16 → (4, 4, 1).
    """
    if kind == "AxBxC":
        return given if len(given) == 3 and min(given) > 0 and prod(given) == size else None
    if kind == "2.5d" and given:
        legal = len(given) == 3 and min(given) > 0 and given[0] == given[1] and prod(given) == size
        return given if legal else None
    grid: Grid | None = None
    if kind in ("1d", "1d-sp"):
        grid = (size,)
    elif kind == "2.5d":
        squares = (q for q in range(1, isqrt(size) + 1) if size % (q * q) == 0 and size <= q**3)
        side = next(squares, None)
        grid = (side, side, size // side**2) if side else None
    else:
        dims = 2 if kind == "2d" else 3
        side = _root(size, dims)
        grid = (side,) * dims if side**dims == size else None
    return grid if given in ((), grid) else None


def tensor_axes(kind: str, grid: Grid) -> tuple[tuple[str, int], ...]:
    """The mesh axes that a grid spans and their sizes, outermost first.

    1d → tp; 2d → row, col; 2.5d → depth, row, col; 3d and AxBxC → a, b, c.
    """
    if kind in ("1d", "1d-sp"):
        return (("tp", grid[0]),)
    if kind == "2.5d":
        rows, columns, depth = grid
        return ("depth", depth), ("row", rows), ("col", columns)
    return tuple(zip(("row", "col") if kind == "2d" else ("a", "b", "c"), grid, strict=True))


def tensor_needs(size: int, kind: str, given: Grid) -> str:
    """What a kind asks of a grid, for the message that ``size`` ranks, or the sides ``given``, are not one."""
    if kind == "AxBxC":
        whole = len(given) == 3 and min(given) > 0
        return f"{grid_text(given)} has {prod(given)} ranks, not {size}" if whole else "AxBxC needs three sides, from 1"
    if kind == "2.5d" and len(given) == 3:
        return f"2.5-D of depth {given[2]} needs q·q·{given[2]} ranks"
    return {
        "2d": "2-D needs a square, q·q ranks",
        "2.5d": "2.5-D needs q·q·d ranks, with the depth d at most q unless /D gives it",
        "3d": "3-D needs a cube, q·q·q ranks (AxBxC takes any three sides)",
    }.get(kind, f"{kind} is a single axis of N ranks")


def nearest_tensor_grids(size: int, kind: str, given: Grid) -> list[Grid]:
    """The legal grids of a kind whose sizes are closest to ``size`` from below and above. For AxBxC the sides that were
    given, whatever their product, and the grid of ``size`` ranks whose sides are closest to them."""
    if kind == "AxBxC":
        sides = (*(side for side in given if side > 0), 1, 1, 1)[:3] if given else (1, 1, size)
        return [sides] if prod(sides) == size else [sides, _nearest_box(size, sides)]
    if kind == "2.5d" and len(given) == 3 and given[2] > 0:
        depth, side = given[2], isqrt(size // given[2])
        return [(q, q, depth) for q in (side, side + 1) if q > 0]
    sizes = nearest_numbers(size, lambda n: tensor_grid(n, kind) is not None, most=8 * size)
    return [grid for n in sizes if (grid := tensor_grid(n, kind))]


def _nearest_box(size: int, sides: Grid) -> Grid:
    """The three sides of ``size`` ranks whose ratios to ``sides`` are the closest to 1; of several the one with the
    longest first side, which divides samples and so fits every model."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    boxes = ((a, b, size // (a * b)) for a in divisors for b in divisors if size % (a * b) == 0)
    return min(
        boxes, key=lambda box: (round(sum(abs(log(n / m)) for n, m in zip(box, sides, strict=True)), 6), -box[0])
    )


def resize_tensor_grid(kind: str, grid: Grid, side: int, length: int) -> Grid:
    """``grid`` with side number ``side`` set to ``length``; sides that the kind keeps equal follow it."""
    if kind == "AxBxC":
        return (*grid[:side], length, *grid[side + 1 :])
    return tuple(length for _ in grid) if kind != "2.5d" else (length, length, grid[2])


def side_text(kind: str, side: int, length: int) -> str:
    """What a length of side number ``side`` is called: ``2 ranks``, ``2 columns``, ``side c = 2``."""
    if kind in SUMMA_KINDS:
        return f"{length} columns"
    return f"side {'abc'[side]} = {length}" if kind in ("3d", "AxBxC") else f"{length} ranks"


def grid_text(grid: Grid) -> str:
    """``2x2x1``."""
    return "x".join(map(str, grid))


def head_side(kind: str) -> int:
    """Which side of the grid splits the attention heads: the output columns of a block's first linear."""
    return {"1d": 0, "1d-sp": 0, "3d": 2, "AxBxC": 2}.get(kind, 1)


def hidden_side(kind: str) -> int | None:
    """Which side of the grid splits the hidden size of the residual stream; None where none does."""
    return None if kind in ("1d", "1d-sp") else 1


def context_grid(size: int, kind: str, given: Grid = ()) -> Grid | None:
    """(U, R): in attention U ranks split the heads and R the sequence; None where there is no such grid."""
    if kind == "UxR":
        return given if len(given) == 2 and min(given) > 0 and prod(given) == size else None
    grid = (size, 1) if kind == "ulysses" else (1, size)
    return grid if given in ((), grid) else None


def nearest_context_grid(size: int, kind: str, given: Grid) -> Grid:
    """A legal grid for an error message: the sides that were given, whatever their product."""
    if kind == "UxR" and given:
        return (*(side for side in given if side > 0), 1, 1)[:2]
    return (size, 1) if kind == "ulysses" else (1, size)


def _one(_ranks: int) -> int:
    return 1


@dataclass(frozen=True)
class Schedule:
    """What a pipeline schedule admits. The bounds on micro-batches are functions of the pipeline's ranks."""

    chunks: int = 1
    """Stages a rank holds unless V says otherwise."""
    any_chunks: bool = False
    """Whether V may differ from ``chunks``."""
    asynchronous: bool = False
    """Whether gradients meet weights newer than those they were computed with."""
    per_micro_batch: bool = False
    """Whether each micro-batch is an update of its own, of each stage by itself."""
    made_to_measure: bool = False
    """Whether its order is made for given times and a limit of memory."""
    mb_step: Callable[[int], int] = _one
    mb_least: Callable[[int], int] = _one

    def admits(self, ranks: int, mb: int) -> bool:
        """Whether ``mb`` micro-batches can run through a pipeline of ``ranks`` ranks."""
        return mb >= self.mb_least(ranks) and mb % self.mb_step(ranks) == 0

    def nearest_mb(self, ranks: int, mb: int) -> list[int]:
        """The admitted numbers of micro-batches closest to ``mb``, one or two, ascending."""
        step = self.mb_step(ranks)
        first = -(-self.mb_least(ranks) // step) * step
        below = mb // step * step
        return sorted({max(below, first), max(below + step, first)} if below != mb else {max(mb, first)})


SCHEDULES = {
    "gpipe": Schedule(),
    "1f1b": Schedule(),
    "1f1b-overlap": Schedule(),
    # Its order goes in rounds of p micro-batches through every chunk (Narayanan et al., 2104.04473).
    "interleaved": Schedule(chunks=2, any_chunks=True, mb_step=lambda p: p),
    "breadth-first": Schedule(chunks=2, any_chunks=True),
    "zb-h1": Schedule(),
    "zb-h2": Schedule(),
    "zb-v": Schedule(chunks=2),
    # Both directions of the V must be full before the steady state begins.
    "dualpipe-v": Schedule(chunks=2, mb_least=lambda p: 2 * p),
    "list": Schedule(any_chunks=True, made_to_measure=True),
    "pipedream": Schedule(asynchronous=True, per_micro_batch=True),
    "pipedream-vertical": Schedule(asynchronous=True, per_micro_batch=True),
    # With fewer, a micro-batch in flight would need a weight version that has not been made yet.
    "2bw": Schedule(asynchronous=True, mb_least=lambda p: max(1, p - 1)),
}


def split_evenly(total: int, parts: int) -> Grid:
    """``parts`` whole numbers that sum to ``total`` and differ by at most one, the larger first."""
    return tuple(total // parts + (part < total % parts) for part in range(parts))


def nearest_numbers(value: int, legal: Callable[[int], bool], most: int) -> list[int]:
    """The legal numbers closest to ``value`` from below (from 1) and from above (to ``most``), ascending."""
    below = next((n for n in range(min(value, most), 0, -1) if legal(n)), None)
    above = next((n for n in range(value + 1, most + 1) if legal(n)), None)
    return [n for n in (below, above) if n is not None]


def _root(size: int, dims: int) -> int:
    """The largest whole number whose ``dims``-th power is at most ``size``."""
    side: int = round(size ** (1 / dims))
    return side - 1 if side**dims > size else side
