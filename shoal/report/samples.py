"""Samples as text: what counts in the loss in colour, the rest dim, and a rule where a document begins."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal.data.spans import Look, Part, Shown
from shoal.data.store import TokenStore

_COUNTS, _OTHER, _BOUND = "green", "dim", "magenta"


def store_told(store: TokenStore) -> str:
    """What a new token store holds, and what to do with it."""
    name, documents = escape(str(store.path)), len(store.documents) - 1
    line = f"[bold]{name}[/]: {len(store):,} tokens in {documents:,} documents, vocabulary {store.vocab:,}"
    if store.counts is not None:
        line += f"\n{store.n_counted:,} of the tokens ({_share(store.n_counted, len(store))}) count in the loss"
        line += f"; written as {store.template}" if store.template else ""
    packing = ', perhaps packing = "documents"' if store.counts is not None else ""
    return (
        f'{line}\nnext: set path = "{name}" under \\[data] in a run file{packing}, with model.vocab at least '
        f"{store.vocab}, and shoal train it"
    )


def look_told(look: Look, console: Console) -> RenderableType:
    """The samples, and what packing makes of the stores they come from."""
    what = "document" if look.step is None else "sample"
    # Without colours, what counts stands between brackets.
    marks = not console.is_terminal or console.no_color
    parts: list[RenderableType] = [_packing(look.parts), Text()] if look.parts else []
    for one in look.samples:
        parts += [_title(one, what), _body(one, marks), Text()]
    return Group(*parts)


def _packing(parts: Iterable[Part]) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    table.add_column("source", overflow="fold")
    for name in ("share", "samples", "length", "padded", "counts", "cut", "left out"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in parts:
        found = one.packing
        table.add_row(
            escape(str(one.path)),
            f"{one.share:.1%}",
            f"{found.samples:,}",
            f"{found.positions // found.samples:,}",
            _share(found.padded, found.positions),
            _share(found.counted, found.positions),
            f"{found.cut:,}",
            f"{found.left_out:,}",
        )
    return table


def _title(shown: Shown, what: str) -> Text:
    tokens = sum(span.tokens for span in shown.spans)
    counted = sum(span.tokens for span in shown.spans if span.counts)
    facts = [f"{tokens:,} tokens", f"{counted:,} count"]
    if shown.padded:
        facts.append(f"{shown.padded:,} padded")
    if shown.left:
        facts.append(f"{shown.left:,} more not shown")
    return Text(f"{what} {shown.number} of {shown.store}: {', '.join(facts)}", "bold")


def _body(shown: Shown, marks: bool) -> Text:
    text = Text()
    for span in shown.spans:
        if span.opens:
            fresh = not text.plain or text.plain.endswith("\n")
            text.append("" if fresh else "\n").append("── document ──\n", _BOUND)
        words = f"⟦{span.text}⟧" if marks and span.counts else span.text
        text.append(words, _COUNTS if span.counts else _OTHER)
    return text


def _share(some: int, all_: int) -> str:
    return f"{some / all_:.1%}"
