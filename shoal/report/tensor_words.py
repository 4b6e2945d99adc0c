"""What each kind of tensor parallelism divides, and the words that it moves.

The costs are what a rank receives in forward and backward pass together, of one micro-batch of M tokens. A grid's are
those of one linear, from K features to N, where all sizes divide.
"""

from __future__ import annotations

from math import prod

from shoal.layout import Layout
from shoal.layout.kinds import Grid

_LINEAR = "words received for M tokens by a linear from K features to N"


def tensor_meaning(layout: Layout) -> tuple[str, str]:
    """(what it divides, what it costs)."""
    grid = layout.tp_grid
    match layout.tp_kind:
        case "1d" | "1d-sp":
            return _line(layout.tp, sequence=layout.tp_kind == "1d-sp")
        case "2d" | "2.5d":
            return _square(grid), _square_cost(layout)
        case _:
            return _box(grid), _box_cost(grid)


def _line(p: int, *, sequence: bool) -> tuple[str, str]:
    """Megatron (Shoeybi et al. 2019); with ``sequence`` parallelism (Korthikanti et al. 2022) inputs are fetched again
    for the backward pass."""
    times = 10 if sequence else 8
    what = f"each matrix is cut in {p}: heads, feed-forward columns, vocabulary rows"
    if sequence:
        what += f"; between matrices 1/{p} of the positions"
    return what, f"words received for each activation, in every block: {times}(P−1)/P = {times * (p - 1) / p:.3g}"


def _square(grid: Grid) -> str:
    """SUMMA (van de Geijn & Watts 1997) as Optimus has it (Xu et al. 2021, arXiv 2104.05343); several of them are
    Tesseract (Wang et al. 2021, arXiv 2105.14500)."""
    q, depth = grid[0], (*grid, 1)[2]
    if q == 1:
        return f"each of {depth} depths has all of each weight, and samples of its own"
    cut = f"{q}×{q}" + f", the same at each of {depth} depths" * (depth > 1)
    samples = "depth·row" if depth > 1 else "row"
    return (
        f"each weight is cut {cut}: rows (outputs) over col, columns (inputs) over row; "
        f"{samples} divides samples, col heads and features"
    )


def _square_cost(layout: Layout) -> str:
    q, depth = layout.tp_grid[0], (*layout.tp_grid, 1)[2]
    if q == 1:
        return "nothing moves within a depth"
    # Both forms move the same words.
    moved = "gathered" if layout.tp_form == "gather" else "sent block after block"
    words = _terms((3 * (q - 1) / q**2 / depth, "MK"), (3 * (q - 1) / q**2, "KN"))
    formula = f"3(q−1)(MK{'/d' * (depth > 1)}+KN)/q²"
    return f"inputs are {moved} over col, weights over row; {_LINEAR}: {formula} = {words}"


def _box(grid: Grid) -> str:
    """A linear on an a×b×c grid; with three equal sides that of Bian et al. (2021, arXiv 2105.14450)."""
    sides = dict(zip("abc", grid, strict=True))

    def over(*axes: str) -> str:
        cut = [axis for axis in axes if sides[axis] > 1]
        return f"over {'·'.join(cut)}" if cut else "uncut"

    first = f"of a block's first linears rows (outputs) {over('c')}, columns (inputs) {over('b', 'a')}"
    second = f"of its second ones (out, down) rows {over('b')}, columns {over('c', 'a')}"
    parts = {"a": "samples", "c": "positions", "b": "features"}
    stream = ", ".join(f"{what} {over(axis)}" for axis, what in parts.items() if sides[axis] > 1)
    return f"each weight is cut in {prod(grid)}: {first}; {second}; of the stream {stream}"


def _box_cost(grid: Grid) -> str:
    """Of sides of one rank nothing is said: nothing moves over them."""
    a, b, c = grid
    gathered = [f"{what} over {axis}" for what, axis, side in (("inputs", "c", c), ("weights", "a", a)) if side > 1]
    entering = " and ".join(gathered).replace(" over", " are gathered over", 1)
    moves = [f"{entering}, again for the backward pass"] * bool(gathered)
    moves += ["outputs are summed over b"] * (b > 1)
    terms = [
        (times, axis, side, what)
        for times, axis, side, what in ((3, "c", c, "MK"), (3, "a", a, "KN"), (2, "b", b, "MN"))
        if side > 1
    ]
    formula = "+".join(f"{times}({axis}−1){what}" for times, axis, _, what in terms)
    words = _terms(*((times * (side - 1) / prod(grid), what) for times, _, side, what in terms))
    total = f"({formula})/P" if len(terms) > 1 else f"{formula}/P"
    second = ", in second linears with b and c exchanged" * (b != c)
    if b == 1 < c:
        second = ", in second linears 2(c−1)MN instead of 3(c−1)MK"
    elif c == 1 < b:
        second = ", in second linears 3(b−1)MK instead of 2(b−1)MN"
    return f"{'; '.join(moves)}; {_LINEAR}: {total} = {words}{second}"


def _terms(*terms: tuple[float, str]) -> str:
    """``0.75·MK + 0.375·KN``."""
    return " + ".join(f"{times:.3g}·{what}" for times, what in terms if times) or "0"
