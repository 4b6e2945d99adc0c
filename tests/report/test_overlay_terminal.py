"""A step over its simulation in a terminal, read back from what is printed."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.segment import Segment
from traces import late, made_up

from shoal.pipeline.program import Op
from shoal.report.overlay import overlay
from shoal.report.overlay_terminal import Lanes, overlay_report


def printed(line: str, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    seen = overlay(made_up(line, 0.001, lambda _, act: late(act, Op.FORWARD, 1, 1, 0.03)), step=4)
    console.print(overlay_report(seen))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 140])
@pytest.mark.parametrize("line", ["pp=4,mb=4", "pp=2:zb-v,mb=4", "pp=2:pipedream,mb=2", "mb=2"])
def test_two_rows_a_rank_fit_whatever_the_width(line: str, width: int) -> None:
    lines = printed(line, width)
    assert max(map(len, lines)) <= width
    rows = [row for row in lines if " measured   " in row[:20] or row.startswith(" " * 7 + " simulated  ")]
    assert len(rows) == 2 * len(overlay(made_up(line)).ranks)
    console = Console(file=io.StringIO(), width=width, color_system="truecolor", force_terminal=True)
    coloured = console.render_lines(Lanes(overlay(made_up(line))), pad=False)
    assert max(map(Segment.get_line_length, coloured)) <= width


def test_letters_show_where_it_was_late() -> None:
    lines = printed("pp=2,mb=3", 100)
    ran, simulated = (next(row for row in lines if name in row[:20]) for name in ("measured ", "simulated "))
    assert ran.split()[:3] == ["rank", "0", "measured"]
    assert ran.split()[-1] != simulated.split()[-1]
    assert "F0" in ran
    assert "F0" in simulated


def test_it_says_what_it_comes_to_and_where_the_waits_are() -> None:
    text = "\n".join(printed("pp=2,mb=3", 120))
    for words in (
        "1f1b: 2 ranks, 3 micro-batches, step 4", "layout pp=2,mb=3; traced: steps 3 to 5 (--step)",
        "a message 1.00 ms", "bubble/time", "of simulated", "longest waits", "longest beyond the simulation",
        "the backward pass of stage 0, micro-batch 1",
    ):  # fmt: skip
        assert words in text
    assert "no rank waited for another" in "\n".join(printed("mb=2", 120))


def test_it_says_what_stands_after_a_letter() -> None:
    said = {line: "\n".join(printed(line, 140)) for line in ("pp=2:zb-v,mb=4", "pp=2,mb=3")}
    assert "after the letter, where there is room: stage.micro-batch" in said["pp=2:zb-v,mb=4"]
    assert re.search(r" measured .*[FIW][0-3]\.[0-3]", said["pp=2:zb-v,mb=4"])
    assert "after the letter, where there is room: micro-batch" in said["pp=2,mb=3"]
