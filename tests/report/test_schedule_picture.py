from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import product
from pathlib import Path

import pytest

from shoal.pipeline.lower import lower
from shoal.pipeline.program import Op, Programs
from shoal.pipeline.schedules.gpipe import gpipe
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b
from shoal.report.schedule import bubble, most_in_flight, schedule_svg, timeline

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("ranks", "micro_batches"), list(product((1, 2, 3, 4, 8), (1, 2, 4, 7, 16))))
@pytest.mark.parametrize("backward", [1.0, 2.0, 2.5])
def test_both_schedules_take_as_long_as_the_literature_says(ranks: int, micro_batches: int, backward: float) -> None:
    """(m + p − 1)·(F + B), of which m·(F + B) is work; with what is sent and received in the programs, or without."""
    for passes in (gpipe(ranks, micro_batches), one_f_one_b(ranks, micro_batches)):
        for programs in (passes, lower(passes)):
            bars = timeline(programs, {Op.FORWARD: 1.0, Op.BACKWARD: backward})
            assert max(one[-1].stop for one in bars) == (micro_batches + ranks - 1) * (1 + backward)
            assert bubble(bars) == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


def test_the_numbers_of_four_ranks_and_eight_micro_batches() -> None:
    assert [most_in_flight(one) for one in timeline(one_f_one_b(4, 8))] == [4, 3, 2, 1]
    assert [most_in_flight(one) for one in timeline(gpipe(4, 8))] == [8] * 4
    first_backward = [next(bar.start for bar in one if bar.act.op is Op.BACKWARD) for one in timeline(gpipe(4, 8))]
    assert first_backward == [17, 15, 13, 11]


@pytest.mark.parametrize(
    ("file", "name", "programs"), [("gpipe", "GPipe", gpipe(4, 8)), ("1f1b", "1F1B", one_f_one_b(4, 8))]
)
def test_the_pictures_in_the_documentation_are_drawn_from_the_programs(
    file: str, name: str, programs: Programs
) -> None:
    picture = schedule_svg(programs, name)
    assert (PICTURES / f"{file}.svg").read_text(encoding="utf-8") == picture
    root = ET.fromstring(picture)
    for css in ("f", "b"):
        bars = [one for one in root.iter(f"{SVG}rect") if one.get("class") == css and one.get("width") != "14"]
        assert len(bars) == 4 * 8
    lanes = [one for one in root.iter(f"{SVG}rect") if one.get("class") == "lane"]
    right = max(float(one.get("x", 0)) + float(one.get("width", 0)) for one in root.iter(f"{SVG}rect"))
    assert right == float(lanes[0].get("x", 0)) + float(lanes[0].get("width", 0))
