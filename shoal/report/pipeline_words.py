"""A pipeline schedule in words: what it is, what it comes to, and what to try next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote

from shoal.layout.kinds import SCHEDULES
from shoal.layout.layout import BUILT, Layout
from shoal.report.pipeline import ALIKE, PassTimes, Pipeline, clock, percent

_RANKS = 8
"""Ranks whose numbers are listed one by one."""
_TINY, _LAYERS, _BATCH = Path("runs/tiny.toml"), 8, 24
"""A small model for a proof, how many layers it has, and the samples of its step."""
_OTHERS = {
    "gpipe": ("in less memory", "1f1b"),
    "1f1b": ("a smaller bubble in the same memory", "zb-h1"),
    "1f1b-overlap": ("without running ahead further", "1f1b"),
    "interleaved": ("as small a bubble in less memory", "zb-v"),
    "breadth-first": ("in less memory", "interleaved"),
    "zb-h1": ("half the bubble, two stages a rank", "zb-v"),
    "zb-h2": ("in half the memory", "zb-h1"),
    "zb-v": ("an order made for given times", "list"),
    "dualpipe-v": ("in less memory", "zb-v"),
    "list": ("made by hand, two stages a rank", "zb-v"),
    "pipedream": ("two weight versions on every rank", "2bw"),
    "pipedream-vertical": ("fewer weight versions, and a shorter delay on later ranks", "pipedream"),
    "2bw": ("without delay, with a bubble", "1f1b"),
}
"""What another schedule offers."""


def headline(seen: Pipeline) -> str:
    """``interleaved, 8 ranks × 2 stages, 16 micro-batches``."""
    stages = f" × {seen.chunks} stages" if seen.chunks > 1 else ""
    ranks = f"{seen.ranks} rank" + "s" * (seen.ranks != 1)
    numbers = f"{seen.micro_batches} micro-batch" + "es" * (seen.micro_batches != 1)
    return f"{seen.name}: {ranks}{stages}, {numbers}" + " a step" * seen.is_stream


def times_words(seen: Pipeline) -> str:
    """What everything takes."""
    times = seen.times
    halves = f"{clock(times.input_gradient)} (I, for the input) + {clock(times.weight_gradient)} (W, for the weights)"
    moving = f"{clock(times.transfer)} to move on" if times.transfer else "no time to move on"
    return f"a micro-batch takes, on a rank, forward {clock(times.forward)} and backward {halves}; {moving}"


def chunk_words(seen: Pipeline) -> Iterator[str]:
    """How the stages of a rank are told apart."""
    if seen.chunks > 1:
        first = [stage for stage, rank in enumerate(seen.home) if rank == 0]
        yield f"a shade for each stage of a rank: on rank 0 stages {', '.join(map(str, first))}"


def figures(seen: Pipeline) -> Iterator[tuple[str, str, str]]:
    """(name, number, meaning) of everything the picture comes to; the bubble in the three ways in which it is told."""
    idle = seen.makespan - seen.work
    what = f"of which a rank works {clock(seen.work)} and idles {clock(idle)}, on average"
    yield "a steady step" if seen.is_stream else "makespan", clock(seen.makespan), what
    what = "idle time for a unit of work, as Megatron-LM tells it: (p − 1)/m for 1F1B"
    yield "bubble/work", percent(seen.bubble_per_work), what
    what = "the idle share of the step, as GPipe and the zero-bubble paper tell it"
    yield "bubble/time", percent(seen.bubble_share), what
    what = "beyond its work, from a rank's first pass to its last: what is left where steps overlap (zero bubble)"
    yield "bubble in a span", clock(seen.bubble_within), what
    what = f"{by_rank(seen.peaks)}: micro-batches whose activations a rank holds at one moment"
    yield "peak live", clock(max(seen.peaks)), what
    yield "weight versions", str(max(seen.weight_versions)), by_rank(seen.weight_versions)


def by_rank(values: Sequence[float]) -> str:
    """``4, 3, 2, 1 on ranks 0–3``; of many ranks the first and the last, or what is the same on all."""
    if len(set(values)) == 1:
        return f"{clock(values[0])} on every rank"
    shown = [clock(value) for value in values]
    if len(values) > _RANKS:
        shown = [*shown[:3], "…", *shown[-2:]]
    return f"{', '.join(shown)} on ranks 0–{len(values) - 1}"


def next_steps(seen: Pipeline, drawn: bool, memory: float | None = None) -> Iterator[tuple[str, str]]:
    """(what for, command): with the times that are seen, and the ``memory`` that was asked for."""
    m, p, name, times = seen.micro_batches, seen.ranks, seen.name, seen.times
    what, other = _OTHERS[name]
    chunks = seen.chunks if SCHEDULES[other].any_chunks else SCHEDULES[other].chunks
    yield what, _command(other, p, SCHEDULES[other].nearest_mb(p, m)[-1], chunks, times)
    if times == ALIKE:
        yield "with times as you measure them", _command(name, p, m, seen.chunks, PassTimes(1, 1.2, 0.8, 0.1), memory)
    if not drawn:
        yield "a picture with all of it", f"{_command(name, p, m, seen.chunks, times, memory)} --picture out/{name}.svg"
    if _TINY.exists() and name in BUILT["pp"] and 1 < len(seen.home) <= _LAYERS:
        own = SCHEDULES[name].made_to_measure and times != ALIKE
        layout = Layout(
            pp=p, schedule=name, chunks=seen.chunks, mb=m, list_times=times if own else None, list_memory=memory
        )
        batch = f" --set data.batch={m}" if _BATCH % m else ""
        yield "proof that it computes the same", f"shoal verify {_TINY} --layout {quote(str(layout))}{batch}"


def _command(
    name: str, ranks: int, micro_batches: int, chunks: int, times: PassTimes, memory: float | None = None
) -> str:
    """``shoal schedule`` with what is not as it is by itself."""
    command = f"shoal schedule {name} -p {ranks} -m {micro_batches}"
    if chunks != SCHEDULES[name].chunks:
        command += f" -v {chunks}"
    if times != ALIKE:
        command += f" --times {','.join(map(_number, times))}"
    return command if memory is None else f"{command} --memory {_number(memory)}"


def _number(number: float) -> str:
    """As few characters as read back as the same."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)
