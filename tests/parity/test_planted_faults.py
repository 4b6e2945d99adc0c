"""verify must catch and name the faults that distributed training is prone to: each is planted here on purpose.

A fault is patched into this process and inherited by workers forked afterwards. It touches the layout's side only, so
the one process it is compared with stays right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

from shoal import engine as engine_module
from shoal.cli import app
from shoal.comm.collectives import Pending, all_reduce, start_all_gather, start_all_reduce, start_reduce_scatter
from shoal.comm.world import World
from shoal.config import load
from shoal.data_parallel import norm as norm_module
from shoal.data_parallel import sync as sync_module
from shoal.data_parallel import zero as zero_module
from shoal.data_parallel.allreduce import AllReduce
from shoal.data_parallel.sync import Main, Sync
from shoal.engine import Engine
from shoal.layout import Layout
from shoal.model import decoder as decoder_module
from shoal.model.dropout import Noise
from shoal.optim.clip import squared_norm
from shoal.pipeline.mail import Form, Kind, Mail
from shoal.pipeline.program import Act
from shoal.placement import Rule
from shoal.tensor.one_d import OneD
from shoal.train import verify as verify_module
from shoal.train.pool import Pool
from shoal.train.verify import Report, verify

RUN = Path(__file__).parents[2] / "runs" / "tiny6.toml"

Patch = Callable[[pytest.MonkeyPatch], None]


HERE: list[int] = []
"""The rank of this process, if it is one of several and a fault asks for that."""


def knowing_ranks(patch: pytest.MonkeyPatch) -> None:
    make = World.__init__

    def noted(self: World, rank: int = 0, size: int = 1, *arguments: Any, **options: Any) -> None:
        HERE[:] = [rank] if size > 1 else []
        make(self, rank, size, *arguments, **options)

    patch.setattr(World, "__init__", noted)


def on_rank(rank: int) -> bool:
    return rank in HERE


# ---- replicas


def local_token_count(patch: pytest.MonkeyPatch) -> None:
    def start(tensor: Any, group: Any, purpose: str, *rest: Any) -> Pending:
        return Pending(None) if purpose == "weight" else start_all_reduce(tensor, group, purpose, *rest)

    patch.setattr(engine_module, "start_all_reduce", start)


def reduced_twice(patch: pytest.MonkeyPatch) -> None:
    send = AllReduce._send

    def twice(self: AllReduce, number: int) -> None:
        send(self, number)
        for pending in self._pending[-1][1]:
            pending.wait()
        flat = self.flats[number]
        for start, stop, division in flat.bucket.own_ranges():
            all_reduce(flat.own_grads[start:stop], self._mesh.group(division.cross), "gradients")

    patch.setattr(AllReduce, "_send", twice)


def never_reduced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sync_module, "start_all_reduce", lambda *_: Pending(None))


def norm_counted_twice(patch: pytest.MonkeyPatch) -> None:
    right = norm_module.global_norm
    patch.setattr(norm_module, "global_norm", lambda squares, group: 2**0.5 * right(squares, group))


def stale_weights(patch: pytest.MonkeyPatch) -> None:
    knowing_ranks(patch)
    update = Engine._update

    def late(self: Engine, first: int) -> None:
        if not (on_rank(1) and self.steps_done == 2):
            update(self, first)

    patch.setattr(Engine, "_update", late)


def mask_on_one_rank_only(patch: pytest.MonkeyPatch) -> None:
    knowing_ranks(patch)
    masked = verify_module._masked
    patch.setattr(verify_module, "_masked", lambda batch, config: batch if on_rank(1) else masked(batch, config))


def micro_batch_forgotten(patch: pytest.MonkeyPatch) -> None:
    add = Main.add_product

    def first_only(self: Main, left: Tensor, right: Tensor) -> None:
        if not (self.held.name == "blocks.2.ffn.down.weight" and self.entered):
            add(self, left, right)

    patch.setattr(Main, "add_product", first_only)


def dropout_by_local_number(patch: pytest.MonkeyPatch) -> None:
    knowing_ranks(patch)

    def of(seed: int, step: int, sample: Tensor, length: int) -> Noise:
        return Noise.of(seed, step, sample - sample[0] if HERE else sample, length)

    patch.setattr(decoder_module, "Noise", type("Local", (), {"of": staticmethod(of)}))


def box_held_by_nobody(patch: pytest.MonkeyPatch) -> None:
    gradients = Engine.gradients
    patch.setattr(
        Engine, "gradients", lambda self: [one for one in gradients(self) if one.piece.name != "head.norm.weight"]
    )


# ---- ZeRO


def part_of_another_rank(patch: pytest.MonkeyPatch) -> None:
    def scatter(out: Tensor, tensor: Tensor, group: Any, purpose: str) -> Pending:
        return start_reduce_scatter(out, tensor.roll(out.numel()), group, purpose)

    patch.setattr(zero_module, "start_reduce_scatter", scatter)


def parameters_not_gathered_again(patch: pytest.MonkeyPatch) -> None:
    """A rank goes on with what it gathered first, whatever has been updated."""
    first: dict[int, Tensor] = {}

    def gather(out: Tensor, part: Tensor, group: Any, purpose: str) -> Pending:
        start_all_gather(out, part, group, purpose).wait()
        out.copy_(first.setdefault(part.data_ptr(), out.clone()))
        return Pending(None)

    patch.setattr(sync_module, "start_all_gather", gather)


# ---- tensor parallelism


def copies_counted_as_parts(patch: pytest.MonkeyPatch) -> None:
    """In the norm, every rank's share whole."""

    def add(self: Sync, number: int) -> None:
        self.norm._squares += squared_norm(self.flats[number].own_grads)

    patch.setattr(Sync, "_add_squares", add)


def only_replicas_counted_as_copies(patch: pytest.MonkeyPatch) -> None:
    """In the norm, what tensor-parallel ranks both have counts twice."""

    def add(self: Sync, number: int) -> None:
        flat = self.flats[number]
        for start, stop, division in flat.bucket.own_ranges():
            self.norm._squares += squared_norm(flat.own_grads[start:stop]) / len(division.cross)

    patch.setattr(Sync, "_add_squares", add)


def sequence_norms_not_summed(patch: pytest.MonkeyPatch) -> None:
    whole = OneD._whole

    def as_if_repeated(self: OneD, *tensor: Any) -> Rule:
        return whole(OneD(self.sizes["tp"]), *tensor)

    patch.setattr(OneD, "_whole", as_if_repeated)


def key_value_replicas_not_summed(patch: pytest.MonkeyPatch) -> None:
    not_summed(patch, lambda axis: axis == "tp")


# ---- pipelines


def tied_embedding_not_exchanged(patch: pytest.MonkeyPatch) -> None:
    not_summed(patch, lambda axis: "pp" in axis)


def not_summed(patch: pytest.MonkeyPatch, over: Callable[[str], bool]) -> None:
    def start(tensor: Tensor, group: Any, purpose: str) -> Pending:
        return Pending(None) if over(group.axis) else start_all_reduce(tensor, group, purpose)

    patch.setattr(sync_module, "start_all_reduce", start)


def gradient_of_another_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """Every gradient but the first of a step is the one before."""
    right = Mail.take_gradient

    def late(self: Any, act: Act) -> Tensor:
        found = right(self, act)
        before, self.before = getattr(self, "before", found.clone()), found.clone()
        return before

    patch.setattr(Mail, "take_gradient", late)


def activation_of_the_micro_batch_before(patch: pytest.MonkeyPatch) -> None:
    """Every activation but the first of a step is the one before."""
    room, right = Mail.activation, Mail.await_activation

    def made(self: Any, act: Act, kind: Kind) -> tuple[Tensor, Form]:
        self.room, form = room(self, act, kind)
        return self.room, form

    def late(self: Any, act: Act) -> None:
        right(self, act)
        before, self.before = getattr(self, "before", self.room.clone()), self.room.clone()
        self.room.copy_(before)

    patch.setattr(Mail, "activation", made)
    patch.setattr(Mail, "await_activation", late)


# ---- what verify says


@dataclass(frozen=True)
class Fault:
    """Plants it; a layout that it spoils; what verify says of it, after how many steps; which gradients alone it names,
    where the others are right; and what of the run file must be otherwise."""

    plant: Patch
    layout: str
    named: str
    steps: int = 1
    guilty: str = ""
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.plant.__name__} {self.layout}"


TIED, SHARED_HEADS = ("model.tied=true",), ("model.heads=4", "model.kv_heads=2")
FAULTS = [
    Fault(local_token_count, "dp=2,mb=2", "loss differs"),
    Fault(reduced_twice, "dp=2,mb=2", "gradient head.out.weight differs"),
    Fault(never_reduced, "dp=2,mb=2", "gradient embed.table.weight is not the same on rank 1"),
    Fault(norm_counted_twice, "dp=2,mb=2", "grad_norm differs", guilty="none"),
    Fault(stale_weights, "dp=2,mb=2", "weight embed.table.weight is not the same on rank 1", steps=4),
    Fault(mask_on_one_rank_only, "dp=2,mb=2", "loss differs"),
    Fault(micro_batch_forgotten, "dp=2,mb=2", "gradient blocks.2.ffn.down.weight", guilty="blocks.2.ffn.down"),
    Fault(dropout_by_local_number, "dp=2,mb=2", "gradient embed.table.weight differs"),
    Fault(
        box_held_by_nobody,
        "dp=2,mb=2",
        "gradient head.norm.weight differs by nan (relative): some of it is held by no rank",
        guilty="head.norm",
    ),
    Fault(part_of_another_rank, "dp=2,zero=2", "gradient head.out.weight differs"),
    Fault(parameters_not_gathered_again, "dp=2,zero=3", "gradient blocks.0.attn.q.weight differs", steps=2),
    Fault(copies_counted_as_parts, "tp=2", "grad_norm differs", guilty="none"),
    Fault(copies_counted_as_parts, "dp=2,tp=2", "grad_norm differs", guilty="none"),
    Fault(only_replicas_counted_as_copies, "tp=2", "grad_norm differs", guilty="none"),
    Fault(only_replicas_counted_as_copies, "dp=2,tp=2", "grad_norm differs", guilty="none"),
    Fault(
        sequence_norms_not_summed,
        "tp=2:1d-sp",
        "gradient blocks.1.ffn_norm.weight is not the same on rank 1",
        guilty="norm",
    ),
    Fault(
        key_value_replicas_not_summed,
        "tp=4",
        "gradient blocks.0.attn.k.weight is not the same on rank 1",
        guilty="attn.[kv]",
        settings=SHARED_HEADS,
    ),
    *(
        Fault(
            tied_embedding_not_exchanged,
            layout,
            f"gradient embed.table.weight is not the same on rank {rank}",
            guilty="embed.table",
            settings=TIED,
        )
        for layout, rank in (("pp=2,mb=2", 1), ("dp=2,pp=2,zero=1", 2))
    ),
    Fault(
        gradient_of_another_micro_batch,
        "pp=2:gpipe,mb=3",
        "gradient blocks.0.attn.q.weight",
        guilty="embed|blocks.[01]",
    ),
    Fault(activation_of_the_micro_batch_before, "pp=2:1f1b,mb=3", "loss differs"),
]


QUICK = ("dp=2,mb=2", "tp=2:1d-sp")
"""Layouts whose faults are looked for in the quick suite too."""


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        pytest.param(one, dtype, id=f"{one} {dtype}", marks=() if quick else pytest.mark.parity)
        for one in FAULTS
        for dtype in ("float64", "float32")
        for quick in [one.layout in QUICK and dtype == "float64"]
    ],
)
def test_a_planted_fault_is_caught_and_named(fault: Fault, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    with Pool(Layout.parse(fault.layout).ranks) as with_it:
        report = compare(fault.layout, fault.settings, with_it, fault.steps, dtype)
    assert not report.agree
    assert any(said.startswith(fault.named) for said in report.faults), report.faults
    gradients = [said for said in report.faults if said.startswith("gradient ")]
    assert all(re.search(fault.guilty, said) for said in gradients), gradients


@pytest.mark.parity
@pytest.mark.parametrize(
    ("line", "settings"), sorted({(fault.layout, fault.settings) for fault in FAULTS}), ids=lambda value: str(value)
)
def test_without_a_fault_the_same_comparison_agrees(line: str, settings: tuple[str, ...], pool: Pool) -> None:
    for dtype in ("float64", "float32"):
        report = compare(line, settings, pool, 4, dtype)
        assert report.agree, report.faults


def test_a_layout_that_disagrees_exits_with_one_and_names_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced_twice(monkeypatch)
    outcome = CliRunner().invoke(app, ["verify", str(RUN), "--layout", "dp=2", "--steps", "1"])
    assert outcome.exit_code == 1
    assert "head.out.weight" in outcome.output


def compare(line: str, settings: tuple[str, ...], pool: Pool, steps: int, dtype: str = "float64") -> Report:
    config = load(RUN, ("model.layers=3", "data.seq_len=16", *settings))
    return verify(config, Layout.parse(f"{line},dtype={dtype}"), pool, steps)
