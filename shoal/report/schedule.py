"""A pipeline schedule as a picture, drawn from its programs: which rank does what, when, and what it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.pipeline.program import Act, Op, Program, giver, placement

COSTS = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}
_WIDTH, _LEFT, _RIGHT, _LANE, _GAP, _TOP = 860, 66, 104, 34, 6, 34
_NAMES = {Op.FORWARD: ("f", "forward"), Op.BACKWARD: ("b", "backward")}
_STYLE = """<style>
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .small { font-size: 11.5px }  .on { fill: #ffffff }  .muted { fill: #59636e }
  .f { fill: #2f6fd0 }  .b { fill: #c2571a }  .lane { fill: #f3f5f8 }  .line { stroke: #59636e; stroke-width: 1 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }  .muted { fill: #9aa5b1 }  .lane { fill: #1b2129 }  .on { fill: #ffffff }
    .f { fill: #2c66bf }  .b { fill: #b04e17 }  .line { stroke: #9aa5b1 }
  }
</style>"""


class Bar(NamedTuple):
    """A pass, and when it runs, in units of the costs."""

    act: Act
    start: float
    stop: float


def timeline(programs: Sequence[Program], costs: Mapping[Op, float] = COSTS) -> list[list[Bar]]:
    """Each rank's passes, as early as they can run in the order of its program when moving a tensor takes no time."""
    stages = len(placement(programs))
    todo = [[act for act in program.actions if act.op in costs] for program in programs]
    bars: list[list[Bar]] = [[] for _ in programs]
    stops: dict[Act, float] = {}
    while any(todo):
        before = len(stops)
        for passes, done in zip(todo, bars, strict=True):
            while passes and ((source := giver(passes[0], stages)) is None or source in stops):
                start = max(done[-1].stop if done else 0.0, stops[source] if source else 0.0)
                stops[passes[0]] = start + costs[passes[0].op]
                done.append(Bar(passes[0], start, stops[passes[0]]))
                passes.pop(0)
        assert len(stops) > before, "programs that wait for each other have no time line"
    return bars


def bubble(bars: Sequence[Sequence[Bar]]) -> float:
    """The share of the time, from the start of the first pass to the end of the last, in which a rank has no work:
    the mean over ranks."""
    work = sum(bar.stop - bar.start for one in bars for bar in one)
    return 1 - work / len(bars) / max(one[-1].stop for one in bars)


def most_in_flight(bars: Sequence[Bar]) -> int:
    """The most (stage, micro-batch) pairs of a rank that are between their forward and their backward pass."""
    most = live = 0
    for bar in bars:
        live += 1 if bar.act.op is Op.FORWARD else -1
        most = max(most, live)
    return most


def schedule_svg(programs: Sequence[Program], name: str, costs: Mapping[Op, float] = COSTS) -> str:
    """The time line as an SVG picture that follows the viewer's light or dark theme."""
    bars = timeline(programs, costs)
    end = max(one[-1].stop for one in bars)
    unit = (_WIDTH - _LEFT - _RIGHT) / end
    bottom = _TOP + len(bars) * (_LANE + _GAP)
    share = f"{end:g} units of time, {bubble(bars):.0%} of them bubble"
    caption = f"{share}; the numbers are those of micro-batches"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 34}" role="img" '
        f'aria-label="{name} over {len(bars)} ranks and {programs[0].micro_batches} micro-batches: {share}">',
        _STYLE,
        *_legend(name, costs),
        f'<text class="muted small" x="{_WIDTH - _RIGHT + 10}" y="22">most in flight</text>',
    ]
    several = any(len(program.stages) > 1 for program in programs)
    for rank, one in enumerate(bars):
        y = _TOP + rank * (_LANE + _GAP)
        middle = y + _LANE / 2 + 4
        parts += [
            f'<text x="12" y="{middle:g}">rank {rank}</text>',
            f'<rect class="lane" x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_LANE}" rx="4"/>',
            f'<text class="muted" x="{_WIDTH - _RIGHT + 10}" y="{middle:g}">{most_in_flight(one)}</text>',
        ]
        for act, start, stop in one:
            left, width = _LEFT + start * unit, (stop - start) * unit
            label = f"{act.stage}.{act.micro_batch}" if several else f"{act.micro_batch}"
            parts += [
                f'<rect class="{_NAMES[act.op][0]}" x="{left + 0.75:.1f}" y="{y + 3}" width="{width - 1.5:.1f}" '
                f'height="{_LANE - 6}" rx="3"/>',
                f'<text class="on small" x="{left + width / 2:.1f}" y="{middle:g}" text-anchor="middle">{label}</text>',
            ]
    parts += [
        f'<path class="line" d="M{_LEFT} {bottom + 2}H{_WIDTH - _RIGHT}"/>',
        f'<text class="muted small" x="{_LEFT}" y="{bottom + 20}">{caption}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(name: str, costs: Mapping[Op, float]) -> list[str]:
    parts = [f'<text x="12" y="22">{name}</text>']
    x = _LEFT + 60
    for op, (css, word) in _NAMES.items():
        parts += [
            f'<rect class="{css}" x="{x}" y="11" width="14" height="14" rx="3"/>',
            f'<text class="small" x="{x + 20}" y="22">{word} pass, time {costs[op]:g}</text>',
        ]
        x += 170
    return parts
