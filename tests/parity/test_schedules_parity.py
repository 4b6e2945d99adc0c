"""Every pipeline schedule computes what one process computes; an asynchronous one, what the recurrence that defines it
does."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config import Config, load
from shoal.errors import LayoutError
from shoal.layout import Layout
from shoal.train.pool import Pool
from shoal.train.setup import fit
from shoal.train.verify import Report, verify

pytestmark = pytest.mark.parity

RUNS = Path(__file__).parents[2] / "runs"

ONE_A_RANK = ("gpipe", "1f1b", "1f1b-overlap", "zb-h1", "zb-h2", "list")
TWO_A_RANK = ("interleaved", "breadth-first", "zb-v", "dualpipe-v", "list/2")
SYNCHRONOUS = (*ONE_A_RANK, *TWO_A_RANK)
SPLIT = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v", "list")
ASYNCHRONOUS = ("pipedream", "pipedream-vertical", "2bw")

SGD = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.clip=0.05")
ADAMW = ("optimizer.name=adamw", "optimizer.clip=0.05")
"""Gradients that are clipped at every step: see :func:`clipped`."""


def read(*more: str, batch: int = 40) -> Config:
    """Eight blocks, so that each of eight stages has one; a batch that eight and five micro-batches divide."""
    return load(RUNS / "tiny.toml", ["data.seq_len=8", "model.vocab=96", f"data.batch={batch}", *more])


def exact(line: str) -> Layout:
    return Layout.parse(f"{line},dtype=float64")


def agrees(report: Report, limit: float = 1e-9) -> None:
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < limit
    assert report.drift < 1e-12
    assert len(report.worst) > 50, "every weight is compared, and unless steps overlap every gradient"


# ---- synchronous


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_a_schedule_agrees(schedule: str, ranks: int, tied: bool, eight: Pool) -> None:
    config = read(f"model.tied={str(tied).lower()}")
    report = verify(config, exact(f"pp={ranks}:{schedule},mb=8"), eight, steps=3)
    agrees(report)
    assert report.truth == "one process"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_micro_batches_that_do_not_divide_agree_or_are_refused(schedule: str, ranks: int, eight: Pool) -> None:
    refused = {("interleaved", 2): "use mb=4 or mb=6", ("interleaved", 4): "use mb=4 or mb=8"}
    refused[("dualpipe-v", 4)] = "use mb=8"
    line = f"pp={ranks}:{schedule},mb=5"
    if (legal := refused.get((schedule, ranks))) is not None:
        with pytest.raises(LayoutError, match=rf"layout\.mb = 5: .*; {legal}$"):
            exact(line)
    else:
        agrees(verify(read(), exact(line), eight, steps=2))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_a_schedule_agrees_under_every_stage_of_zero(schedule: str, zero: int, eight: Pool) -> None:
    line = f"dp=2,pp=2:{schedule},zero={zero},mb=4"
    agrees(verify(read("model.tied=true"), exact(line), eight, steps=2))


@pytest.mark.parametrize(
    "grid", ["dp=2,tp=2,pp=2:{},mb=4", "tp=4:2d,pp=2:{},mb=4", "dp=2,tp=2:1d-sp,pp=2:{},zero=3,mb=4"]
)
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_a_schedule_agrees_within_other_parallelism(schedule: str, grid: str, eight: Pool) -> None:
    """A weight that waits for its gradient has it made by every rank of a grid together."""
    agrees(verify(read("model.tied=true"), exact(grid.format(schedule)), eight, steps=2))


@pytest.mark.parametrize(
    ("schedule", "grid"), [*((one, "tp=4:{},pp=2") for one in SPLIT)], ids=lambda value: value.partition(":")[0]
)
def test_a_split_backward_pass_agrees_on_every_kind_of_grid(schedule: str, grid: str, eight: Pool) -> None:
    for kind in ("1d-sp", "2d{form=loop}", "2x2x1", "1x2x2", "2.5d"):
        head, tail = grid.format(kind).split(",")
        agrees(verify(read("model.tied=true"), exact(f"{head},{tail}:{schedule},mb=4"), eight, steps=2))


@pytest.mark.parametrize(
    "line",
    [
        "pp=2:interleaved/4,mb=4",
        "pp=2:breadth-first/4,mb=3",
        "pp=2:list/3,mb=8",
        "pp=3:interleaved,mb=3",
        "pp=3:zb-v,mb=8",
        "pp=3:dualpipe-v,mb=6",
        "pp=8:zb-h1,mb=8",
        "pp=8:zb-h2,mb=2",
        "pp=1:zb-v,mb=2",
        "pp=1:interleaved,mb=2",
    ],
)
def test_other_numbers_of_ranks_and_stages_agree(line: str, eight: Pool) -> None:
    agrees(verify(read(batch=48), exact(line), eight, steps=2))


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("schedule", sorted({*SYNCHRONOUS} - {"interleaved", "dualpipe-v"}))
def test_fewer_micro_batches_than_ranks_agree(schedule: str, micro_batches: int, eight: Pool) -> None:
    agrees(verify(read(batch=12), exact(f"pp=4:{schedule},mb={micro_batches}"), eight, steps=2))


@pytest.mark.parametrize(
    "line",
    [
        "pp=2:zb-h1{layers=5/3},mb=4",
        "pp=4:1f1b-overlap{layers=1/4/2/1},mb=8",
        "pp=2:interleaved{layers=1/3/2/2},mb=4",
        "pp=2:zb-v{layers=3/1/1/3},mb=5",
        "pp=2:dualpipe-v{layers=1/2/2/3},mb=4",
        "dp=2,pp=2:breadth-first{layers=2/1/4/1},zero=3,mb=4",
    ],
)
def test_uneven_stages_agree(line: str, eight: Pool) -> None:
    agrees(verify(read("model.tied=true"), exact(line), eight, steps=2))


@pytest.mark.parametrize("recompute", ["full", "selective", "full{stages=0/1}"])
@pytest.mark.parametrize("schedule", [*SPLIT, "interleaved"])
def test_recomputation_agrees_under_a_split_backward_pass(schedule: str, recompute: str, eight: Pool) -> None:
    for grid in ("pp=2:{},mb=4", "dp=2,tp=2,pp=2:{},zero=3,mb=4"):
        agrees(verify(read(), exact(f"{grid.format(schedule)},recompute={recompute}"), eight, steps=2))


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_a_schedule_agrees_in_float32_to_its_precision(schedule: str, eight: Pool) -> None:
    report = verify(read(), Layout.parse(f"pp=2:{schedule},mb=8,dtype=float32"), eight)
    assert report.agree, report.faults
    assert max(report.max_rel["loss"], report.max_rel["grad_norm"]) < 2e-5, report.max_rel


# ---- asynchronous


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [*(("pipedream" + sync, number) for sync in ("", "-vertical") for number in (1, 2, 5)), ("2bw", 3), ("2bw", 8)],
)
def test_an_asynchronous_schedule_agrees_with_the_recurrence(
    schedule: str, micro_batches: int, ranks: int, optimizer: tuple[str, ...], eight: Pool
) -> None:
    """Over seven steps, of which the third and the last end with a drain; every update clips."""
    config = read(*optimizer, batch=8 * micro_batches)
    report = verify(config, exact(f"pp={ranks}:{schedule},mb={micro_batches}"), eight, steps=7)
    agrees(report)
    assert set(report.max_rel) == {"loss", "grad_norm", "weight"}
    assert report.truth == f"one process with gradients as old as those of {schedule}"


@pytest.mark.parametrize(
    "line",
    [
        "dp=2,pp=2:{},mb=4",
        "dp=2,pp=2:{},zero=1,mb=3",
        "dp=2,pp=4:{},zero=1,mb=5",
        "tp=2,pp=2:{},mb=2",
        "dp=2,tp=2:1d-sp,pp=2:{},zero=1,mb=2",
        "tp=4:2d,pp=2:{},mb=2",
        "tp=4:2x1x2,pp=2:{},zero=1,mb=2",
        "pp=2:{}{{layers=5/3}},mb=4",
        "pp=4:{},mb=3,recompute=full",
        "dp=2,pp=2:{},mb=2,recompute=selective",
        "pp=1:{},mb=2",
    ],
)
@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_an_asynchronous_schedule_agrees_within_other_parallelism(schedule: str, line: str, eight: Pool) -> None:
    agrees(verify(read(*ADAMW, batch=120), exact(line.format(schedule)), eight))


@pytest.mark.parametrize("name", ["lion", "muon"])
@pytest.mark.parametrize("line", ["pp=3:pipedream,mb=2", "pp=3:pipedream-vertical,mb=2", "dp=2,zero=1,pp=2:2bw,mb=3"])
def test_every_optimizer_agrees_under_an_asynchronous_schedule_or_is_refused(line: str, name: str, eight: Pool) -> None:
    config = read(f"optimizer.name={name}", "optimizer.lr=3e-3", batch=24)
    if name == "muon" and "pipedream" in line:
        with pytest.raises(LayoutError, match=r"Muon's ranks work together, and under pipedream.* use pp=3:2bw"):
            verify(config, exact(line), eight)
    else:
        agrees(verify(config, exact(line), eight))


@pytest.mark.parametrize("line", ["pp=2:2bw,mb=4", "pp=4:2bw,mb=3", "dp=2,pp=2:2bw,zero=1,mb=2", "tp=2,pp=2:2bw,mb=2"])
def test_a_tied_embedding_is_exact_under_2bw(line: str, eight: Pool) -> None:
    agrees(verify(read("model.tied=true", *ADAMW, batch=24), exact(line), eight, steps=7))


def test_what_an_asynchronous_schedule_cannot_do_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"zero > 1 cannot shard; use zero=1"):
        exact("dp=2,pp=2:2bw,zero=2,mb=4")
    with pytest.raises(LayoutError, match=r"2bw over 4 ranks admits at least 3 micro-batches; use mb=3"):
        exact("pp=4:2bw,mb=2")
    for schedule in ("pipedream", "pipedream-vertical"):
        said = rf"under {schedule} the two .* drift apart; use model\.tied=false or pp=2:1f1b"
        with pytest.raises(LayoutError, match=said):
            fit(read("model.tied=true"), exact(f"pp=2:{schedule},mb=4"), 2)
