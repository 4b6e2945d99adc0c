"""What a person reads of a layout."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from shoal import config
from shoal.layout import Layout
from shoal.report.example import MODEL, example
from shoal.report.layout import layout_report
from shoal.report.ownership import ownership, shown
from shoal.train.setup import fit, make_model


def lines(line: str, **sizes: Any) -> list[str]:
    """The report on a layout of the example, or of a model of other ``sizes``."""
    layout = Layout.parse(line)
    run = example(layout).model_copy(update={"model": config.Model(**{**MODEL, **sizes})})
    plan = fit(run, layout, layout.ranks)
    out = StringIO()
    Console(file=out, width=110, highlight=False).print(
        layout_report(ownership(make_model(run, plan), plan, shown(plan)))
    )
    return [row.rstrip() for row in out.getvalue().splitlines()]


def after(found: list[str], start: str) -> list[str]:
    """The lines after the one that begins so, up to an empty one."""
    (at,) = [place for place, row in enumerate(found) if row.startswith(start)]
    rest = found[at + 1 :]
    return rest[: rest.index("")] if "" in rest else rest


def test_every_axis_rank_stage_and_weight_is_told() -> None:
    found = lines("dp=2,tp=2:1d-sp,pp=2:1f1b,zero=3,mb=4")
    assert found[0] == "dp=2,tp=2:1d-sp,pp=2,zero=3,mb=4 on 8 ranks"
    keys = [row.split()[0] for row in found[1 : found.index("")] if not row.startswith("   ")]
    assert keys == ["pp=2", "dp=2", "tp=2:1d-sp", "zero=3", "mb=4"]
    assert [row.split() for row in after(found, "which rank sits where")] == [
        ["pp", "dp", "tp", "0", "→", "1"],
        ["0", "0", "0", "1"],
        ["0", "1", "2", "3"],
        ["1", "0", "4", "5"],
        ["1", "1", "6", "7"],
    ]
    why = " ".join(" ".join(after(found, "where it is cut")).split())
    assert "embed 0, blocks 0–7 43,136 each, head 32,832" in why
    assert "the largest share, which sets the pace, is as small as it can be" in why
    assert [
        " ".join(row.split()) for row in after(found, "stage 0 on ranks 0–3: embed, blocks 0–3, 46% of the cost")
    ] == [
        "weights, gradients, optimizer states; a rank has 51,456 of 410,688",
        "embed",
        "table 512 × 64 0: rows 0–127 · 2: rows 128–255 · 1: rows 256–383 · 3: rows 384–511",
        "each of blocks 0–3",
        "attn_norm 64 0–1: whole",
        "attn.q 64 × 64 0: rows 0–31 · 1: rows 32–63",
        "attn.k 32 × 64 0: rows 0–15 · 1: rows 16–31",
        "attn.v 32 × 64 0: rows 0–15 · 1: rows 16–31",
        "attn.out 64 × 64 0: columns 0–31 · 1: columns 32–63",
        "ffn_norm 64 2–3: whole",
        "ffn.gate 160 × 64 0: rows 0–71 · 2: rows 72–79 · 1: rows 80–151 · 3: rows 152–159",
        "ffn.up 160 × 64 2: rows 0–79 · 3: rows 80–159",
        "ffn.down 64 × 160 2: columns 0–79 · 3: columns 80–159",
    ]
    assert after(found, "stage 1 on ranks 4–7: blocks 4–7, head, 54% of the cost")


def test_stages_that_were_asked_for_are_told_as_such() -> None:
    found = lines("pp=3:1f1b{layers=4/2/2},mb=3")
    assert "Stages are cut as layers=4/2/2 says." in " ".join(row.strip() for row in found)
    shares = [row for row in found if row.startswith("stage ")]
    assert shares == [
        "stage 0 on rank 0: embed, blocks 0–3, 46% of the cost",
        "stage 1 on rank 1: blocks 4–5, 23% of the cost",
        "stage 2 on rank 2: blocks 6–7, head, 32% of the cost",
    ]


def test_several_stages_of_a_rank_are_told_together() -> None:
    found = lines("pp=2:zb-v,mb=4")
    assert [row for row in found if row.startswith("stages ")] == [
        "stages 0, 3 on rank 0: embed, blocks 0–1, 6–7, head, 54% of the cost",
        "stages 1–2 on rank 1: blocks 2–5, 46% of the cost",
    ]
    assert after(found, "stages 0, 3 on rank 0")[0].split("; ")[1] == "a rank has 238,144 of 410,688"
    assert any(row.split() == ["each", "of", "blocks", "0–1,", "6–7"] for row in found)
    told = lines("dp=2,pp=2:interleaved/4,mb=2")
    assert any(row.startswith("stages 1, 3, 5, 7 on ranks 2–3: blocks 1, 3, 5, 7, head") for row in told)
    assert any(row.startswith("stages 0–1 on rank 0: embed, blocks 0–7, head, 100%") for row in lines("pp=1:zb-v,mb=2"))


def test_states_that_lie_apart_from_weights_are_told_apart() -> None:
    found = [" ".join(row.split()) for row in after(lines("dp=2,zero=1"), "who holds what")]
    weights, states = (
        found.index(f"{what} of 410,688")
        for what in ("weights, gradients; a rank has 410,688", "optimizer states; a rank has 205,344")
    )
    assert found[weights + 1 : weights + 5] == [
        "embed",
        "table 512 × 64 0–1: whole",
        "each of blocks 0–7",
        "attn_norm 64 0–1: whole",
    ]
    assert found[states + 1 : states + 4] == ["embed 1: everything", "each of blocks 0–3 1: everything", "blocks.4"]
    assert "ffn_norm 64 0: elements 0–31 · 1: elements 32–63" in found[states:]
    assert found[-2:] == ["each of blocks 5–7 0: everything", "head 0: everything"]


def test_a_grid_is_told_as_a_grid() -> None:
    found = lines("tp=4:2d")
    assert [row.split() for row in after(found, "which rank sits where")] == [
        ["row", "col", "0", "→", "1"], ["0", "0", "1"], ["1", "2", "3"],
    ]  # fmt: skip
    rows = [" ".join(row.split()) for row in after(found, "who holds what")]
    at = rows.index("ffn.gate 160 × 64 columns 0–31 32–63")
    assert rows[at + 1 : at + 3] == ["rows 0–79 0 2", "80–159 1 3"]
    assert "attn_norm 64 0, 2: elements 0–31 · 1, 3: elements 32–63" in rows


@pytest.mark.parametrize(
    ("line", "seats"),
    [
        (
            "tp=8:2.5d",
            [["row", "depth 0: col 0 → 1", "depth 1: col 0 → 1"], ["0", "0  1", "4  5"], ["1", "2  3", "6  7"]],
        ),
        ("tp=8:3d", [["b", "a 0: c 0 → 1", "a 1: c 0 → 1"], ["0", "0  1", "4  5"], ["1", "2  3", "6  7"]]),
        ("tp=8:4x1x2", [["a", "c 0 → 1"], ["0", "0  1"], ["1", "2  3"], ["2", "4  5"], ["3", "6  7"]]),
        (
            "dp=2,pp=2,tp=4:2d,mb=2",
            [
                ["pp", "dp", "row", "col 0 → 1"],
                *([pp, dp, row, f"{at:>2}  {at + 1:>2}"] for pp, dp, row, at in (
                    ("0", "0", "0", 0), ("0", "0", "1", 2), ("0", "1", "0", 4), ("0", "1", "1", 6),
                    ("1", "0", "0", 8), ("1", "0", "1", 10), ("1", "1", "0", 12), ("1", "1", "1", 14),
                )),
            ],
        ),
    ],
)  # fmt: skip
def test_ranks_are_told_as_their_grid_lies(line: str, seats: list[list[str]]) -> None:
    found = after(lines(line), "which rank sits where")
    assert [row.split() for row in found] == [" ".join(row).split() for row in seats]
    (*_, last), (*_, head) = seats[1], seats[0]
    assert found[1].index(last.strip()) >= found[0].index(head) - 1, "fields are below their names"


def test_who_updates_everything_between_them_is_told_in_one_line() -> None:
    rows = [" ".join(row.split()) for row in after(lines("dp=2,tp=8:2.5d,zero=1"), "who holds what")]
    assert "embed 12–15: everything" in rows
    assert "head 0–3: everything" in rows


def test_of_many_holders_and_many_kinds_of_layers_the_first_and_the_last_are_listed() -> None:
    found = [" ".join(row.split()) for row in lines("dp=32,zero=3")]
    assert "table 512 × 64 0: rows 0–15 · 1: rows 16–31 · … 29 more · 31: rows 496–511" in found
    found = [" ".join(row.split()) for row in lines("dp=64,zero=2", layers=20)]
    assert any(row.startswith("not listed: 14 more before the last") for row in found)
    assert "head" in found


def test_of_more_than_64_ranks_one_replica_is_told() -> None:
    found = lines("dp=33,tp=2,zero=3")
    assert "which rank sits where: the first of 33 replicas" in found
    assert [row.split() for row in after(found, "which rank sits where")] == [["tp", "0", "→", "1"], ["0", "1"]]
    told = "\n".join(found)
    assert "other replicas" in told
    assert set(re.findall(r"([\d–]+): (?:whole|rows|columns|elements)", told)) == {"0", "1", "0–1"}
    assert "which rank sits where" in lines("dp=32,tp=2,zero=3")


def test_one_rank_has_everything() -> None:
    found = lines("dp=1")
    assert found[0] == "dp=1 on 1 rank"
    assert "where it is cut" not in found
    assert any("a rank has 410,688 of 410,688" in row for row in found)


@pytest.mark.parametrize("line", ["pp=2,tp=4,mb=2", "dp=2,pp=2,zero=3,mb=2", "pp=2:interleaved,mb=2"])
def test_a_tied_embedding_is_told_on_both_stages(line: str) -> None:
    found = lines(line, tied=True)
    assert [row.split()[0] for row in found if "512 × 64" in row] == ["table", "embed.table"]


def test_a_tied_embedding_is_told_once_where_both_stages_are_on_one_rank() -> None:
    assert [row.split()[0] for row in lines("pp=2:zb-v,mb=2", tied=True) if "512 × 64" in row] == ["table"]
