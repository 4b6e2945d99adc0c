"""What context parallelism divides, and the words that it moves, forward and backward together."""

from __future__ import annotations

from shoal.layout import Layout


def context_meaning(layout: Layout) -> tuple[str, str]:
    """(what it divides, what it costs)."""
    inside, around = layout.cp_grid
    parts = []
    if around > 1:
        gather = layout.cp_kind == "gather"
        how = "keys and values are gathered" if gather else "keys and values go round"
        chunks = f"a sample in {2 * around} chunks, rank r has chunks r and {2 * around - 1}−r" + " together" * (
            inside > 1
        )
        parts.append(f"{chunks}; {how}")
    if inside > 1:
        next_to = f"{inside} ranks next to each other" if around > 1 else f"a sample in {inside} parts; the ranks"
        parts.append(f"{next_to} exchange positions for heads around attention")
    return "; ".join(parts), _cost(inside, around, gather=layout.cp_kind == "gather")


def _cost(u: int, r: int, *, gather: bool) -> str:
    """A ring passes keys and values on twice, and their gradients once more and home. What is gathered is gathered
    twice, and its gradients scattered. An exchange of heads is there and back, both ways."""
    per = "words received in every block, forward and backward, for each word of a sample's"
    terms = []
    if r > 1:
        words = 3 * (r - 1) / r if gather else 2 * (r - 1) / r + 1
        formula = "3(R−1)/R" if gather else "2(R−1)/R + 1"
        shared = f" of one of {u} shares of heads" if u > 1 else ""
        terms.append(f"keys and values{shared}: {formula} = {words:.3g}")
    if u > 1:
        n = u * r
        terms.append(f"queries, keys, values and results: 2(U−1)/(U·P) = {2 * (u - 1) / (u * n):.3g}")
    return f"{per} " + "; ".join(terms)
