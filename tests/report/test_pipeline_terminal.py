"""A pipeline schedule in a terminal, read back from what is printed."""

from __future__ import annotations

import io

import pytest
from rich.color import Color
from rich.console import Console
from rich.segment import Segment

from shoal.report.pipeline import Pipeline, pipeline
from shoal.report.pipeline_colours import DARK, tone
from shoal.report.pipeline_terminal import Timeline, pipeline_report

SIZES = [("1f1b", 4, 8), ("zb-v", 8, 16), ("interleaved", 4, 8), ("pipedream", 4, 4), ("gpipe", 16, 64), ("2bw", 1, 1)]


def printed(seen: Pipeline, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(pipeline_report(seen))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def coloured(seen: Pipeline, width: int) -> list[list[Segment]]:
    console = Console(file=io.StringIO(), width=width, color_system="truecolor", force_terminal=True)
    return console.render_lines(Timeline(seen), pad=False)


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: size[0])
def test_it_fits_whatever_the_width(size: tuple[str, int, int], width: int) -> None:
    seen = pipeline(*size)
    assert max(map(len, printed(seen, width))) <= width
    assert max(Segment.get_line_length(line) for line in coloured(seen, width)) <= width
    rows = [line for line in printed(seen, width) if line.startswith("rank ")]
    assert len(rows) == seen.ranks
    assert len(set(map(len, rows))) == 1


def test_letters_say_what_colours_would() -> None:
    lines = printed(pipeline("1f1b", 2, 3), 80)
    assert [line for line in lines if line.startswith("rank ")] == [
        "rank 0  F0 F1 ······B0--- F2 B1--- ···B2---      2",
        "rank 1  ···F0 B0--- F1 B1--- F2 B2--- ······     1",
    ]
    assert "F forward   B backward   · idle" in lines
    (row, *_) = [line for line in printed(pipeline("zb-v", 2, 4), 160) if line.startswith("rank ")]
    assert row.split()[2:8] == ["F0.0", "F0.1", "F0.2", "F3.0", "I3.0", "W3.0"]


@pytest.mark.parametrize("size", [("1f1b", 4, 8, 80), ("zb-v", 4, 8, 120), ("dualpipe-v", 3, 6, 70)])
def test_every_column_has_the_colour_of_what_happens_then(size: tuple[str, int, int, int]) -> None:
    *which, width = size
    seen = pipeline(*which)  # type: ignore[arg-type]
    rows = [line for line in coloured(seen, width) if line[0].text.startswith("rank ")]
    for bars, row in zip(seen.bars, rows, strict=True):
        halves: list[Color | None] = []
        for segment in row[1:-1]:
            assert segment.style is not None
            own = segment.style.bgcolor
            halves += [segment.style.color, own] if segment.text == "▌" else [own] * (2 * len(segment.text))
        for at, colour in enumerate(halves):
            time = (at + 0.5) / len(halves) * seen.end
            bar = next((bar for bar in bars if bar.start <= time < bar.stop), None)
            if bar is None:
                assert colour == Color.parse("#2a313a")
            else:
                fills = [tone(bar.act.op, bar.chunk, seen.chunks, DARK, shift).fill for shift in (0, 0.045)]
                assert colour == Color.parse(fills[bar.act.micro_batch % 2])


def test_numbers_are_those_of_micro_batches() -> None:
    (row, *_) = [line for line in coloured(pipeline("gpipe", 2, 12), 200) if line[0].text.startswith("rank ")]
    assert "".join(segment.text for segment in row).split()[2:] == [*map(str, range(12)), *map(str, range(12)), "12"]


def test_a_stream_has_the_weights_below() -> None:
    lines = printed(pipeline("2bw", 1, 2), 100)
    (row,) = [at for at, line in enumerate(lines) if line.startswith("rank ")]
    assert lines[row].split()[2:-1] == [f"{letter}{b}{'-' * 3 * (letter == 'B')}" for b in range(6) for letter in "FB"]
    assert lines[row + 1].split() == ["↳", *"00000000", *"1111"]
    assert any("how many updates" in line for line in lines)
    assert not any("↳" in line for line in printed(pipeline("pipedream", 8, 16), 80))


@pytest.mark.parametrize("width", [180, 200, 300])
def test_versions_do_not_run_together(width: int) -> None:
    seen = pipeline("pipedream", 4, 8)
    rows = [line for line in printed(seen, width) if line.lstrip().startswith("↳")]
    assert len(rows) == 4
    for row, bars in zip(rows, seen.bars, strict=True):
        shown = [int(word) for word in row.partition("↳")[2].split()]
        versions = [bar.version for bar in bars]
        assert max(shown) == max(versions) >= 20
        in_order = iter(versions)
        assert all(version in in_order for version in shown)


def test_it_ends_in_the_numbers() -> None:
    text = "\n".join(printed(pipeline("zb-h2", 4, 8), 140))
    for said in (
        "makespan",
        "27",
        "12.5%",
        "Megatron",
        "11.1%",
        "GPipe",
        "bubble in a span",
        "7 on every rank",
        "live",
    ):
        assert said in text
