"""verify must catch and name the faults that distributed training is prone to: each is planted here on purpose.

A fault is patched into this process and inherited by workers forked afterwards. It touches the layout's side only, so
the one process it is compared with stays right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from shoal import engine as engine_module
from shoal.cli import app
from shoal.comm.collectives import Pending, all_reduce, start_all_reduce
from shoal.config import load
from shoal.data_parallel import allreduce
from shoal.data_parallel.allreduce import AllReduce
from shoal.engine import Engine
from shoal.layout import Layout
from shoal.model import decoder as decoder_module
from shoal.model.dropout import Noise
from shoal.train import verify as verify_module
from shoal.train.pool import Pool
from shoal.train.verify import Report, verify

RUN = Path(__file__).parents[2] / "runs" / "tiny6.toml"

Patch = Callable[[pytest.MonkeyPatch], None]


def on_rank(rank: int) -> bool:
    return dist.is_initialized() and dist.get_rank() == rank


def local_token_count(patch: pytest.MonkeyPatch) -> None:
    def start(tensor: Any, group: Any, purpose: str, *rest: Any) -> Pending:
        return Pending(None) if purpose == "weight" else start_all_reduce(tensor, group, purpose, *rest)

    patch.setattr(engine_module, "start_all_reduce", start)


def reduced_twice(patch: pytest.MonkeyPatch) -> None:
    send = AllReduce._send

    def twice(self: AllReduce) -> None:
        send(self)
        if self._sent == 1:
            for pending in self._pending[0][1]:
                pending.wait()
            all_reduce(*self._ranges[0][0], "gradients")

    patch.setattr(AllReduce, "_send", twice)


def never_reduced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(allreduce, "start_all_reduce", lambda *_: Pending(None))


def norm_counted_twice(patch: pytest.MonkeyPatch) -> None:
    right = engine_module.global_norm
    patch.setattr(engine_module, "global_norm", lambda parts, everyone: 2**0.5 * right(parts, everyone))


def stale_weights(patch: pytest.MonkeyPatch) -> None:
    update = Engine._update

    def late(self: Engine) -> None:
        if not (on_rank(1) and self.steps_done == 2):
            update(self)

    patch.setattr(Engine, "_update", late)


def mask_on_one_rank_only(patch: pytest.MonkeyPatch) -> None:
    masked = verify_module._masked
    patch.setattr(verify_module, "_masked", lambda batch, config: batch if on_rank(1) else masked(batch, config))


def micro_batch_forgotten(patch: pytest.MonkeyPatch) -> None:
    done = AllReduce.unit_done
    first: dict[str, torch.Tensor] = {}

    def first_only(self: AllReduce, unit: int, final: bool) -> None:
        for main in self._of_unit[unit]:
            if main.held.name == "blocks.2.ffn.down.weight":
                if main.held.name in self._entered:
                    main.gradient.copy_(first["only"])
                else:
                    assert main.held.parameter.grad is not None
                    first["only"] = main.held.parameter.grad.clone()
        done(self, unit, final)

    patch.setattr(AllReduce, "unit_done", first_only)


def dropout_by_local_number(patch: pytest.MonkeyPatch) -> None:
    def of(seed: int, step: int, sample: torch.Tensor, length: int) -> Noise:
        return Noise.of(seed, step, sample - sample[0] if dist.is_initialized() else sample, length)

    patch.setattr(decoder_module, "Noise", type("Local", (), {"of": staticmethod(of)}))


def box_held_by_nobody(patch: pytest.MonkeyPatch) -> None:
    gradients = Engine.gradients
    patch.setattr(
        Engine, "gradients", lambda self: [one for one in gradients(self) if one.piece.name != "head.norm.weight"]
    )


FAULTS: list[tuple[Patch, str]] = [
    (local_token_count, "loss differs"),
    (reduced_twice, "gradient head.out.weight differs"),
    (never_reduced, "gradient embed.table.weight is not the same on rank 1"),
    (norm_counted_twice, "grad_norm differs"),
    (stale_weights, "weight embed.table.weight is not the same on rank 1"),
    (mask_on_one_rank_only, "loss differs"),
    (micro_batch_forgotten, "gradient blocks.2.ffn.down.weight differs"),
    (dropout_by_local_number, "gradient embed.table.weight differs"),
    (box_held_by_nobody, "gradient head.norm.weight differs by nan (relative): some of it is held by no rank"),
]


@pytest.mark.parametrize(("plant", "named"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_a_planted_fault_is_caught_and_named(plant: Patch, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    report = compare()
    assert not report.agree
    assert any(fault.startswith(named) for fault in report.faults), report.faults


def test_without_a_fault_the_same_comparison_agrees() -> None:
    assert compare().agree


def test_a_layout_that_disagrees_exits_with_one_and_names_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced_twice(monkeypatch)
    outcome = CliRunner().invoke(app, ["verify", str(RUN), "--layout", "dp=2", "--steps", "1"])
    assert outcome.exit_code == 1
    assert "head.out.weight" in outcome.output


def compare() -> Report:
    with Pool(2) as pool:
        return verify(load(RUN), Layout.parse("dp=2,mb=2,dtype=float64"), pool, steps=4)
