from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.config import Model, Optimizer
from shoal.errors import ConfigError
from shoal.local import lay_out
from shoal.mesh import Grid
from shoal.model.decoder import Decoder
from shoal.optim.treatment import Treatment, Treatments
from shoal.tensor.whole import Whole

ADAMW = ("exp_avg", "exp_avg_sq")


def decoder(**choices: Any) -> Decoder:
    with torch.device("meta"):
        return Decoder(Model(layers=2, hidden=8, heads=2, kv_heads=1, ffn=6, vocab=10, **choices))


def treated(config: Optimizer, model: Decoder | None = None) -> dict[str, Treatment]:
    """The treatment of every logical weight."""
    model = model or decoder()
    grid = Grid((("dp", 1),))
    treat = Treatments(config)
    treat.check(model, model.roles)
    held = lay_out(model, model.layers(), model.roles, Whole(), grid, grid.coords(0))
    return {piece.name: how for one in held for piece, how in zip(one.placement.pieces, treat(one), strict=True)}


def refusal(module: nn.Module, roles: Any = None, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Treatments(Optimizer(**settings)).check(module, roles or {})
    return str(caught.value)


def test_matrices_decay_and_vectors_do_not() -> None:
    found = treated(Optimizer(weight_decay=0.3))
    assert {name for name, how in found.items() if how.weight_decay == 0} == {
        *(f"blocks.{i}.{norm}.weight" for i in (0, 1) for norm in ("attn_norm", "ffn_norm")),
        "head.norm.weight",
    }
    assert set(found.values()) == {Treatment("adamw", 1.0, 0.3, ADAMW), Treatment("adamw", 1.0, 0.0, ADAMW)}


@pytest.mark.parametrize("tied", [False, True])
def test_muon_takes_hidden_matrices_and_adamw_the_rest(tied: bool) -> None:
    found = treated(Optimizer(name="muon"), decoder(tied=tied))
    tables = {"embed.table.weight"} | (set() if tied else {"head.out.weight"})
    assert {name for name, how in found.items() if how.name == "adamw"} == {
        *(f"blocks.{i}.{norm}.weight" for i in (0, 1) for norm in ("attn_norm", "ffn_norm")),
        "head.norm.weight",
        *tables,
    }
    assert {name.removeprefix("blocks.0.") for name, how in found.items() if how.name == "muon" and ".0." in name} == {
        *("attn.q.weight", "attn.k.weight", "attn.v.weight", "attn.out.weight"),
        *("ffn.gate.weight", "ffn.up.weight", "ffn.down.weight"),
    }


def test_a_weight_belongs_to_the_first_group_that_matches() -> None:
    groups = (
        {"match": "blocks.0.*.q.weight", "lr": 0.5},
        {"match": "*.q.weight", "lr": 0.25, "weight_decay": 0.0},
        {"match": "*norm*", "weight_decay": 0.7},
        {"match": "embed.*", "name": "sgd"},
    )
    found = treated(Optimizer(groups=groups, weight_decay=0.3))
    assert found["blocks.0.attn.q.weight"] == Treatment("adamw", 0.5, 0.3, ADAMW)
    assert found["blocks.1.attn.q.weight"] == Treatment("adamw", 0.25, 0.0, ADAMW)
    assert found["blocks.1.attn.k.weight"] == Treatment("adamw", 1.0, 0.3, ADAMW)
    assert found["head.norm.weight"] == Treatment("adamw", 1.0, 0.7, ADAMW)
    assert found["embed.table.weight"] == Treatment("sgd", 1.0, 0.3, ())


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"match": "embd.table.*"}], r"groups\.0\.match = embd\.table\.\*: .* no weight \(did you mean 'embed\.table"),
        ([{"match": "zzz"}], r"groups\.0\.match = zzz: matches no weight; the weights have names such as head\.out"),
        ([{"match": "embed.*"}, {"match": "embed.table.*"}], r"groups\.1\.match = .* only what groups before it take"),
        ([{"match": "*.q.weight", "name": "lion"}], r"attn\.q\.weight, .* are one matrix here, of adamw and lion"),
        ([{"match": "*.attn_norm.weight", "name": "muon"}], r"groups\.0\.name = muon: .* has 1 dims"),
    ],
)
def test_groups_that_do_not_suit_the_model_are_refused(groups: list[dict[str, Any]], message: str) -> None:
    model = decoder()
    with pytest.raises(ConfigError, match=message):
        Treatments(Optimizer(groups=groups)).check(model, model.roles)


def test_muon_without_a_matrix_to_train_is_refused() -> None:
    assert refusal(nn.LayerNorm(4), name="muon") == (
        "optimizer.name = muon: the model has no matrix for it to train; use adamw"
    )
    frozen = nn.Linear(3, 3).requires_grad_(False)
    assert "no matrix" in refusal(frozen, name="muon")
    with_more = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    assert "2 dtypes" in refusal(with_more, name="muon")
    assert "no matrix" in refusal(nn.Linear(3, 3), name="muon", groups=[{"match": "weight", "name": "adamw"}])


def test_a_convolution_under_muon_goes_to_adamw() -> None:
    module = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Linear(3, 3))
    grid = Grid((("dp", 1),))
    treat = Treatments(Optimizer(name="muon"))
    treat.check(module, {})
    layers = [(name, child) for name, child in module.named_children()]
    held = lay_out(module, layers, {}, Whole(), grid, grid.coords(0))
    assert {one.name: treat(one)[0].name for one in held} == {
        "0.weight": "adamw", "0.bias": "adamw", "1.weight": "muon", "1.bias": "adamw",
    }  # fmt: skip
