"""Layouts in words: what they say a step costs is what ledgers of real ranks count."""

from __future__ import annotations

import re

import pytest

from shoal import config
from shoal.comm.world import World
from shoal.config import Config
from shoal.layout import Layout
from shoal.report.example import example
from shoal.report.ownership import Section, Share
from shoal.report.wording import few, keeps, meaning, ranks_text, section_text, share_text, stages_text, units_text
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, open_data

SIZES = {"layers": 3, "hidden": 16, "heads": 4, "ffn": 16, "vocab": 32}


def run_of(layout: Layout, layers: int) -> Config:
    """With samples and positions that every layout here divides."""
    given = example(layout)
    data = given.data.model_copy(update={"batch": 4 * given.data.batch})
    return given.model_copy(update={"model": config.Model(**{**SIZES, "layers": layers}), "data": data})


def words_of_a_step(world: World, line: str, layers: int) -> tuple[float, float, float]:
    """Words received: for gradients and parameters, for tensor parallelism; and the parameters of a rank."""
    layout = Layout.parse(line)
    run = run_of(layout, layers)
    engine = make_engine(run, layout, world)
    size = sum(
        one.placement.pieces[0].numel * len(one.placement.pieces)
        for one in (slot.held for flat in engine._sync.flats for slot in flat.bucket.slots)
    )
    for step in range(4 if layout.asynchronous else 0):  # then as many batches end in a step as begin in it
        engine.step(open_data(run).batch(step, engine.mesh.coords["dp"], layout.dp))
    world.ledger.clear()
    engine.step(open_data(run).batch(0, engine.mesh.coords["dp"], layout.dp))
    ledger = world.ledger
    return ledger.words(purpose="gradients") + ledger.words(purpose="parameters"), ledger.words(purpose="tensor"), size


def told(line: str, key: str) -> float:
    """The number at the end of what ``key`` is said to cost."""
    (cost,) = [cost for name, _, cost in meaning(Layout.parse(line)) if name.startswith(f"{key}=")]
    return float(cost.split()[-1])


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("dp=4", "dp"), ("dp=3,mb=2", "dp"), ("dp=4,zero=1", "zero"), ("dp=4,zero=2,mb=2", "zero"),
        ("dp=4,zero=1/2", "zero"), ("dp=4,zero=3", "zero"), ("dp=4,zero=3/2,mb=2", "zero"),
        ("dp=2,pp=2,zero=3,mb=2", "zero"), ("dp=2,pp=1:breadth-first,zero=3,mb=2", "zero"),
        ("dp=2,pp=2:pipedream,mb=3", "dp"), ("dp=2,pp=2:pipedream,zero=1,mb=3", "zero"),
        ("dp=2,pp=2:2bw,zero=1,mb=2", "zero"),
    ],
)  # fmt: skip
def test_replicas_receive_the_words_that_are_told(pool: Pool, line: str, key: str) -> None:
    for words, _, size in pool.run(words_of_a_step, line, SIZES["layers"], ranks=Layout.parse(line).ranks):
        if "zero=3" in line and Layout.parse(line).stages == 1:
            assert 0.6 * told(line, key) * size < words <= told(line, key) * size
        else:
            assert words == pytest.approx(told(line, key) * size, rel=5e-3)  # three digits are told


@pytest.mark.parametrize("line", ["tp=4", "tp=2:1d-sp", "tp=4:1d-sp,mb=2"])
def test_a_block_receives_the_words_that_are_told(pool: Pool, line: str) -> None:
    layout = Layout.parse(line)
    longer, shorter = (
        [words for _, words, _ in pool.run(words_of_a_step, line, layers, ranks=layout.tp)] for layers in (3, 2)
    )
    activations = tokens(layout) * SIZES["hidden"]
    for more, fewer in zip(longer, shorter, strict=True):
        assert more - fewer == pytest.approx(told(line, "tp") * activations, rel=1e-3)


def tokens(layout: Layout) -> int:
    data = run_of(layout, 1).data
    return data.batch * data.seq_len


def words_of_a_linear(line: str, tokens: int, inputs: int, outputs: int) -> float:
    """What a grid is said to cost."""
    (cost,) = [cost for name, _, cost in meaning(Layout.parse(line)) if name.startswith("tp=")]
    told = re.findall(r"([\d.]+)·(MK|KN|MN)", cost.rpartition(" = ")[2])
    sizes = {"MK": tokens * inputs, "KN": inputs * outputs, "MN": tokens * outputs}
    assert told
    return sum(float(times) * sizes[what] for times, what in told)


@pytest.mark.parametrize(
    ("line", "second"),
    [
        ("tp=4:2d", "tp=4:2d"), ("tp=4:2d{form=loop}", "tp=4:2d"), ("tp=4:1x2x2", "tp=4:1x2x2"),
        ("tp=4:2x1x2", "tp=4:2x2x1"), ("tp=4:1x1x4", "tp=4:1x4x1"), ("tp=4:2x2x1", "tp=4:2x1x2"),
        ("tp=4:4x1x1", "tp=4:4x1x1"),
    ],
)  # fmt: skip
def test_linears_of_a_grid_receive_the_words_that_are_told(pool: Pool, line: str, second: str) -> None:
    """``second``: what the second linears of a block are told to be."""
    layout, h, f = Layout.parse(line), SIZES["hidden"], SIZES["ffn"]
    longer, shorter = (
        [words for _, words, _ in pool.run(words_of_a_step, line, layers, ranks=layout.tp)] for layers in (3, 2)
    )
    m = tokens(layout)
    first = words_of_a_linear(line, m, h, 3 * h) + words_of_a_linear(line, m, h, 2 * f)
    block = first + words_of_a_linear(second, m, h, h) + words_of_a_linear(second, m, f, h)
    assert sum(longer) - sum(shorter) == pytest.approx(block * layout.tp, rel=1e-9)


def test_each_part_of_a_layout_is_told_with_its_size() -> None:
    full = "pp=2:list/2{layers=2/2/2/2;memory=2},dp=4,tp=2:1d-sp,zero=3/2,mb=4,recompute=full{stages=0/1}"
    assert [key for key, _, _ in meaning(Layout.parse(full))] == full.split(",")
    assert [key for key, _, _ in meaning(Layout())] == ["dp=1"]
    for line in ("tp=4:2d{form=loop}", "tp=16:2.5d/4", "tp=8:3d", "tp=8:4x1x2", "tp=2"):
        assert [key for key, _, _ in meaning(Layout.parse(line))] == [line]
    assert [key for key, _, _ in meaning(Layout(mb=2))] == ["mb=2"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "pp=2,mb=4",
            "into 2 stages, one a rank\n1f1b: activations of 2, 1 micro-batches are kept; .*, a rank idles 20%",
        ),
        ("pp=3:gpipe,mb=3", "gpipe: activations of 3 micro-batches are kept; .*, a rank idles 40% of a step"),
        ("pp=16,mb=32", "activations of 16, 15 … 1 micro-batches are kept"),
        ("pp=2:zb-v,mb=4", "into 4 stages, 2 a rank: stages 0, 3 on the first\n"),
        ("pp=2:interleaved/3,mb=4", "into 6 stages, 3 a rank: stages 0, 2, 4 on the first\n"),
        ("pp=4:list,mb=8", r"pass take the same time \(the order is made for that\), a rank idles 11% of a step"),
        ("pp=1:zb-v,mb=2", "into 2 stages, 2 a rank: stages 0–1 on the first\nzb-v: activations of 1 micro-batch are"),
        ("pp=3:pipedream,mb=2", "and 3, 2, 1 versions of the weights besides .* weights 2, 1, 0 updates old"),
        ("pp=3:pipedream,mb=2", "each is an update of its own"),
        ("pp=3:pipedream-vertical,mb=2", "and 3 versions of the weights besides .* weights 2 updates old"),
        ("pp=3:2bw,mb=2", "and 2, 2, 1 versions of the weights besides .* weights one update old"),
        ("pp=3:2bw,mb=2", "their gradients add up and are sent once"),
        ("dp=2,pp=2:pipedream,mb=3", r"summed after each micro-batch; .* 2M\(N−1\)/N = 3"),
        ("dp=4,zero=1/2", "optimizer states are divided by 2, in groups of 2 replicas"),
        ("tp=4:2d", r"cut 2×2: rows \(outputs\) over col, columns \(inputs\) over row; row divides samples"),
        ("tp=4:2d", r"gathered over col, weights over row; .* 3\(q−1\)\(MK\+KN\)/q² = 0.75·MK \+ 0.75·KN$"),
        ("tp=9:2d{form=loop}", r"sent block after block over col, .* = 0.667·MK \+ 0.667·KN$"),
        ("tp=8:2.5d", r"cut 2×2, the same at each of 2 depths: .*; depth·row divides samples, col heads and features"),
        ("tp=8:2.5d", r"3\(q−1\)\(MK/d\+KN\)/q² = 0.375·MK \+ 0.75·KN; gradients are summed over depth once .* = 1$"),
        ("dp=2,tp=8:2.5d", r"gradients are summed over dp·depth once a step; .* = 1.5\n"),
        ("dp=2,tp=8:2.5d,zero=1", "optimizer states are divided by 4 over dp·depth\n"),
        ("dp=2,tp=8:2.5d,zero=3/2", "divided by 2 over dp·depth, in groups of 2 ranks\n"),
        ("tp=8:2.5d,zero=2", "optimizer states and gradients are divided by 2 over depth\n"),
        (
            "tp=8:3d",
            r"in 8: .* over c, columns \(inputs\) over b·a; .* rows over b, columns over c·a; of the stream samples",
        ),
        ("tp=8:3d", r"/P = 0.375·MK \+ 0.375·KN \+ 0.25·MN$"),
        ("tp=6:1x2x3", r"/P = 1·MK \+ 0.333·MN, in second linears with b and c exchanged$"),
        ("tp=4:2x1x2", r", in second linears 2\(c−1\)MN instead of 3\(c−1\)MK$"),
        ("tp=4:2x2x1", r", in second linears 3\(b−1\)MK instead of 2\(b−1\)MN$"),
        ("tp=4:4x1x1", r"rows \(outputs\) uncut, columns \(inputs\) over a; .* of the stream samples over a\n"),
        ("dp=2,tp=8:3d,zero=1", "optimizer states are divided by 2, those of vectors by 4, over a too\n"),
        (
            "tp=8:3d,zero=1",
            "of vectors, optimizer states are divided by 2 over a; every part of a matrix is on one rank\n",
        ),
        ("tp=4:1d-sp", "cut in 4: .*1/4 of the positions"),
        ("pp=2,recompute=full{stages=0}", "of each layer in stage 0 only the input is kept"),
        ("recompute=selective", "attention's inner activations are not kept"),
    ],
)
def test_what_a_layout_means(line: str, words: str) -> None:
    text = "\n".join(f"{what}\n{cost}" for _, what, cost in meaning(Layout.parse(line)))
    assert re.search(words, text), text


def test_what_lies_alike() -> None:
    assert keeps(Layout()) == keeps(Layout(dp=2, zero=3)) == ("weights, gradients, optimizer states",)
    assert keeps(Layout(dp=2, zero=1)) == ("weights, gradients", "optimizer states")
    assert keeps(Layout(dp=2, zero=2)) == ("weights", "gradients, optimizer states")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "3"), ((0, 1, 2), "0–2"), ((0, 4), "0, 4"), ((0, 1, 4, 5), "0–1, 4–5"),
        (tuple(range(0, 64, 4)), "0, 4 … 60"), ((0, 2, 4, 6), "0, 2, 4, 6"), ((0, 2, 4, 6, 8), "0, 2 … 8"),
    ],
)  # fmt: skip
def test_ranks_in_few_words(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_text(ranks) == text


def test_stages_in_few_words() -> None:
    assert [stages_text(stages) for stages in ((2,), (0, 3), (3, 4))] == ["stage 2", "stages 0, 3", "stages 3–4"]


def test_layers_in_few_words() -> None:
    names = ["embed", *(f"blocks.{n}" for n in range(12)), "head"]
    assert units_text(names) == "embed, blocks 0–11, head"
    assert units_text(names[5:6]) == "blocks.4"
    assert section_text(Section((2, 3), ()), names) == "each of blocks 1–2"
    assert section_text(Section((0,), ()), names) == "embed"


@pytest.mark.parametrize(
    ("boxes", "shape", "text"),
    [
        ((((0, 8), (0, 4)),), (8, 4), "whole"),
        ((((2, 6), (0, 4)),), (8, 4), "rows 2–5"),
        ((((0, 8), (1, 2)),), (8, 4), "column 1"),
        ((((7, 8), (1, 4)),), (8, 4), "row 7, columns 1–3"),
        ((((1, 2), (2, 4)), ((2, 5), (0, 4)), ((5, 6), (0, 1))), (8, 4), "rows 1–5 in part"),
        ((((0, 7), (0, 4)), ((7, 8), (0, 1))), (8, 4), "all rows in part"),
        ((((1_000, 3_000),),), (4_096,), "elements 1,000–2,999"),
    ],
)
def test_a_share_in_few_words(
    boxes: tuple[tuple[tuple[int, int], ...], ...], shape: tuple[int, ...], text: str
) -> None:
    assert share_text(Share((0,), boxes), shape) == text


def test_few_keeps_the_ends() -> None:
    assert few("abc", 3) == ["a", "b", "c"]
    assert few("abcdef", 3) == ["a", "b", "f"]


@pytest.mark.parametrize("line", ["dp=3,sync=server", "dp=4,sync=server/2", "dp=4,sync=server/4,mb=2"])
def test_what_servers_and_other_ranks_receive_is_what_the_ledger_counts(line: str, pool: Pool) -> None:
    layout = Layout.parse(line)
    (cost,) = [cost for name, _, cost in meaning(layout) if name.startswith("sync=")]
    numbers = [float(number) for number in re.findall(r"([\d.]+) by", cost)]
    assert layout.servers is not None
    expected = numbers[:1] * layout.servers + numbers[1:] * (layout.dp - layout.servers)
    found = pool.run(words_of_a_step, line, 3, ranks=layout.ranks)
    assert [words / size for words, _, size in found] == pytest.approx(expected, rel=0.01)
    assert keeps(layout) == ("weights, gradients", "optimizer states")


def test_how_servers_join_and_how_far_they_are_behind_is_told() -> None:
    lines = ("dp=2,sync=server", "dp=3,sync=server/2{stale=1;reduce=sum}", "dp=2,sync=server{stale=2;reduce=max}")
    one, several, largest = (
        what for line in lines for name, what, _ in meaning(Layout.parse(line)) if name.startswith("sync=")
    )
    assert one == "the first replica serves: it keeps the optimizer states"
    assert several.startswith("the first 2 replicas serve: they divide the optimizer states")
    assert "the sum of the replicas' mean gradients" in several
    assert several.endswith("weights 1 step old")
    assert "element by element, the largest" in largest
    assert largest.endswith("weights 2 steps old")


def test_everything_that_is_away_is_told_with_what_it_costs() -> None:
    line = "dp=2,dtype=bf16,offload=optimizer:nvme@0.5+params:cpu+grads:cpu+activations:nvme"
    told = {key: (what, cost) for key, what, cost in meaning(Layout.parse(line)) if key.startswith("offload")}
    assert list(told) == [
        "offload=optimizer:nvme@0.5", "offload=params:cpu", "offload=grads:cpu", "offload=activations:nvme",
    ]  # fmt: skip
    assert told["offload=optimizer:nvme@0.5"][0].startswith("0.5 of masters and optimizer states in a file")
    assert "in full precision" in told["offload=grads:cpu"][1]
    assert all(what and cost for what, cost in told.values())
    assert [key for key, _, _ in meaning(Layout.parse("offload=params:cpu"))] == ["offload=params:cpu"]
