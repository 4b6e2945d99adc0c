"""Models with experts compute under every layout what one process computes: every gate, layouts drawn over axes, and
faults that are planted to be found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm.collectives import Pending, start_all_reduce
from shoal.comm.world import World
from shoal.config import Config, load
from shoal.data.corpus import Corpus
from shoal.data.tokenize import byte_tokenizer, tokenize
from shoal.data_parallel import sync as sync_module
from shoal.errors import LayoutError
from shoal.expert import exchange as exchange_module
from shoal.expert import tokens as tokens_module
from shoal.expert.interpreter import WithExperts
from shoal.expert.spread import Spread
from shoal.layout import Layout
from shoal.local import Interpreter
from shoal.mesh import Mesh
from shoal.model import beside as beside_module
from shoal.model.roles import Role
from shoal.placement import Rule
from shoal.train.pool import Pool
from shoal.train.setup import fit, make_engine, open_data
from shoal.train.verify import Report, verify

pytestmark = pytest.mark.parity

RUN = Path(__file__).parents[2] / "runs" / "tiny.toml"
SMALL = (
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn=48", "model.vocab=96",
    "model.experts=8", "model.expert_ffn=21", "model.shared_experts=1", "model.gate_renormalise=true",
    "model.balance_loss=0.05", "model.gate_z_loss=0.01", "data.seq_len=13", "data.batch=8", "optimizer.clip=0.1",
)  # fmt: skip
LAYOUTS = (
    "dp=2,ep=2",
    "dp=4,ep=4,zero=1",
    "dp=2,ep=2,tp=2",
    "dp=2,ep=2,pp=2:1f1b,mb=4",
    "dp=4,ep=4,zero=3",
    "dp=2,tp=2,ep=4",
    "tp=2,etp=2",
    "dp=2,tp=2:1d-sp,ep=2,etp=2,zero=1",
    "tp=4:2d,ep=4",
    "tp=4:2.5d/4,ep=2",
    "tp=8:3d,ep=2",
    "tp=4:1x2x2,ep=2,etp=2",
    "dp=4,ep=2,zero=2/2",
    "dp=6,ep=2,zero=1/2",
    "dp=2,ep=2,zero=3,recompute=full",
    "dp=2,ep=2,offload=optimizer:cpu+params:cpu+activations:cpu",
    "dp=2,tp=2,ep=2,sync=server",
    "pp=2:pipedream,mb=2,dp=2,ep=2",
    "pp=2:2bw,mb=2,dp=2,ep=2",
)
GATES = {
    "softmax": (),
    "topk-softmax": ('model.gate="topk-softmax"',),
    "sigmoid": ('model.gate="sigmoid"', "model.bias_rate=0.05", "model.gate_scale=2.5"),
    "sigmoid in groups": ('model.gate="sigmoid"', "model.gate_groups=4", "model.gate_top_groups=2"),
    "softmax in groups": ("model.gate_groups=2", "model.gate_renormalise=false"),
    "sinkhorn": ('model.gate="sinkhorn"',),
    "sinkhorn to one": ('model.gate="sinkhorn"', "model.experts_per_token=1"),
    "expert-choice": ('model.gate="expert-choice"',),
}
DRAWN = 12


def read(*more: str) -> Config:
    return load(RUN, [*SMALL, *more])


def agrees(report: Report) -> None:
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < 1e-9
    assert report.drift == 0.0


def check(line: str, config: Config, eight: Pool, steps: int = 5) -> None:
    layout = Layout.parse(f"{line},dtype=float64")
    samples = layout.dp * layout.mb
    if config.data.batch % samples:
        config = config.model_copy(update={"data": config.data.model_copy(update={"batch": 2 * samples})})
    agrees(verify(config, layout, eight, steps))


@pytest.mark.parametrize("line", LAYOUTS)
def test_a_layout_with_experts_computes_what_one_process_computes(line: str, eight: Pool) -> None:
    check(line, read(), eight)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "interleaved"])
def test_pipelines_that_split_or_interleave(schedule: str, eight: Pool) -> None:
    check(f"dp=2,pp=2:{schedule},ep=2,mb=4,zero=1", read("model.layers=4"), eight)


@pytest.mark.parametrize("capacity", [(), ("model.capacity=1.0",)], ids=["dropless", "capacity"])
@pytest.mark.parametrize("gate", GATES)
def test_every_gate(gate: str, capacity: tuple[str, ...], eight: Pool) -> None:
    check("dp=2,tp=2,ep=4", read(*GATES[gate], *capacity), eight)


@pytest.mark.parametrize("line", ["tp=4:2d,ep=2", "tp=2:1d-sp,dp=2,ep=2,mb=2"])
def test_what_is_dropped_of_a_sequence_that_is_divided(line: str, eight: Pool) -> None:
    check(line, read("model.capacity=0.7", "data.batch=6"), eight)


def test_samples_that_pad_take_no_part(eight: Pool) -> None:
    check("tp=4:2d,ep=4", read("data.batch=7"), eight)


@pytest.mark.parametrize(
    "settings",
    [
        ("optimizer.name=muon",),
        ("model.experts=6",),
        ("model.dense_layers=1", "model.shared_experts=0"),
        ('model.activation="gelu-tanh"', "model.experts_per_token=3"),
        ("model.tied=true", "model.shared_experts=2"),
    ],
)
def test_other_models_with_experts(settings: tuple[str, ...], eight: Pool) -> None:
    check("dp=2,ep=2,zero=1,mb=2", read(*settings), eight)


def drawn() -> Iterator[str]:
    """Layouts of up to eight ranks over all axes."""
    random = Random(8)
    while True:
        tp, kind = random.choice([(1, ""), (2, ""), (2, ":1d-sp"), (4, ":2d"), (4, ":2x1x2"), (2, ":2.5d/2")])
        dp, pp = random.choice([1, 2, 4]), random.choice([1, 1, 2])
        if dp * tp * pp > 8 or dp * tp == 1:
            continue
        ep, etp, mb = random.choice([1, 2, 4, 8]), random.choice([1, 2]), random.choice([1, 2])
        zero = random.choice([0, 1, 2, 3])
        if (dp * tp) % (ep * etp):
            continue
        yield f"dp={dp},tp={tp}{kind},pp={pp}:1f1b,ep={ep},etp={etp},zero={zero},mb={mb * pp}"


def test_layouts_drawn_over_all_axes(eight: Pool) -> None:
    lines = drawn()
    for number in range(DRAWN):
        gate = sorted(GATES)[number % len(GATES)]
        check(next(lines), read(*GATES[gate]), eight, steps=2)


def test_a_gate_whose_bias_would_answer_late_is_refused() -> None:
    config = read('model.gate="sigmoid"')
    with pytest.raises(LayoutError, match="a gate's bias answers the load of the step before"):
        fit(config, Layout.parse("pp=2:2bw,mb=2"), 2)


# ---- faults


def replicas_of_experts_not_summed(patch: pytest.MonkeyPatch) -> None:
    def start(tensor: Tensor, group: Any, purpose: str) -> Pending:
        return Pending(None) if group.size == 2 else start_all_reduce(tensor, group, purpose)

    patch.setattr(sync_module, "start_all_reduce", start)


def experts_held_alike_by_all(patch: pytest.MonkeyPatch) -> None:
    """As if all ranks had all the work of an expert: gradients are not summed over replicas."""
    place = Spread.place

    def alike(self: Spread, *arguments: Any) -> Rule:
        rule = place(self, *arguments)
        axes = frozenset({"dp"})
        return Rule(lambda at: replace(rule.at({"tp": 0, **at}), duplicated=axes), rule.axes | axes)  # type: ignore[type-var]

    patch.setattr(Spread, "place", alike)


def router_taken_for_repeated(patch: pytest.MonkeyPatch) -> None:
    place = WithExperts.place

    def repeated(self: WithExperts, role: Role, *arguments: Any) -> Rule:
        rule = place(self, role, *arguments)
        if role.kind != "router":
            return rule
        return Rule(lambda at: replace(rule.at(at), duplicated=frozenset({"tp"})), frozenset({"tp"}))  # type: ignore[type-var]

    patch.setattr(WithExperts, "place", repeated)


def every_rank_routes_all_tokens(patch: pytest.MonkeyPatch) -> None:
    adapt = WithExperts.adapt

    def all_of_them(self: Interpreter, role: Role, module: Any, mesh: Mesh) -> Any:
        return module if role.kind == "tokens" else adapt(self, role, module, mesh)  # type: ignore[arg-type]

    patch.setattr(WithExperts, "adapt", all_of_them)


def gate_loss_of_every_sharer(patch: pytest.MonkeyPatch) -> None:
    charge = beside_module.Beside.charge

    def doubled(self: Any, layer: str, weights: Tensor, loss: Tensor, sharers: int) -> Tensor:
        return charge(self, layer, weights, loss * sharers, sharers)

    patch.setattr(beside_module.Beside, "charge", doubled)


def gate_loss_without_the_scale(patch: pytest.MonkeyPatch) -> None:
    charge = beside_module.Beside.charge

    def unscaled(self: Any, *arguments: Any) -> Tensor:
        if self.scale is not None:
            self.scale = lambda: torch.ones(())
        return charge(self, *arguments)

    patch.setattr(beside_module.Beside, "charge", unscaled)


def rows_by_source_taken_for_rows_by_expert(patch: pytest.MonkeyPatch) -> None:
    by_expert = exchange_module._by_expert
    patch.setattr(exchange_module, "_by_expert", lambda here, own: by_expert(here, own).sort().values)


def capacity_of_part_of_a_sequence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tokens_module, "all_reduce", lambda *_: None)


FAULTS = (
    (replicas_of_experts_not_summed, "dp=4,ep=2", r"ffn\.experts\.0\.gate\.weight is not the same on rank 2", ()),
    (experts_held_alike_by_all, "dp=4,ep=2", r"ffn\.experts\.0\.gate\.weight is not the same on rank 2", ()),
    (router_taken_for_repeated, "tp=2", r"ffn\.router\.weight is not the same on rank 1", ()),
    (every_rank_routes_all_tokens, "tp=2", r"gradient blocks\.0\.ffn\.experts\.0\.gate\.weight differs", ()),
    (every_rank_routes_all_tokens, "tp=2,ep=2", r"gradient blocks\.0\.ffn\.experts\.0\.gate\.weight differs", ()),
    (gate_loss_of_every_sharer, "tp=2", r"gradient blocks\.0\.ffn\.router\.weight differs", ()),
    (gate_loss_without_the_scale, "dp=2,mb=2", r"gradient blocks\.0\.ffn\.router\.weight differs", ()),
    (rows_by_source_taken_for_rows_by_expert, "dp=2,ep=2", r"gradient blocks\.0\.ffn\.experts\.0\.", ()),
    (capacity_of_part_of_a_sequence, "tp=2:1d-sp", "loss differs", ("model.capacity=0.7",)),
)


@pytest.mark.parametrize(("plant", "line", "named", "settings"), FAULTS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_planted_fault_is_caught_and_named(
    plant: Any, line: str, named: str, settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    layout = Layout.parse(f"{line},dtype=float64")
    with Pool(layout.ranks) as pool:
        report = verify(read(*settings), layout, pool, 1)
    assert not report.agree
    found = "\n".join(report.faults)
    assert re.search(named, found), found


# ---- balance


def largest_loads(world: World, config: Config) -> list[float]:
    """Of each layer the load of the most loaded expert over an even share, on average over the last steps."""
    engine = make_engine(config, Layout.parse("dp=1"), world)
    source, tokens = open_data(config), []
    for step in range(config.run.steps):
        result = engine.step(source.batch(step))
        assert result is not None
        assert result.experts is not None
        tokens.append(result.experts.tokens)
    sums = {layer: torch.tensor([one[layer] for one in tokens[-20:]]).sum(0).double() for layer in tokens[0]}
    return [float(one.max() / one.mean()) for one in sums.values()]


@pytest.mark.parametrize(
    ("settings", "balanced"),
    [
        (("model.balance_loss=0.01",), True),
        (('model.gate="sigmoid"', "model.bias_rate=0.003", "model.gate_renormalise=true"), True),
        ((), False),
    ],
    ids=["loss", "bias", "neither"],
)
def test_training_on_text_balances(settings: tuple[str, ...], balanced: bool, tmp_path: Path, pool: Pool) -> None:
    """Within 300 steps the largest expert has less than 1.5 times an even share, as it has not by itself."""
    config = load(
        RUN,
        [
            "run.steps=300", "model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=4", "model.ffn=64",
            "model.vocab=264", "model.dropout=0", "model.experts=8", "model.expert_ffn=64", "data.seq_len=64",
            "data.batch=8", 'data.source="tokens"', f"data.path={text_store(tmp_path)}", "optimizer.lr=0.003",
            "optimizer.clip=1.0", *settings,
        ],
    )  # fmt: skip
    (found,) = pool.run(largest_loads, config, ranks=1)
    assert (max(found) < 1.5) == balanced, found


def text_store(folder: Path) -> Path:
    """The beginning of the repository's text, a token a byte."""
    text, path = folder / "text.txt", folder / "bytes.store"
    text.write_bytes((RUN.parents[1] / "data" / "kjv.txt").read_bytes()[:400_000])
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    tokenize(Corpus.find(text), folder / "tokenizer.json", path)
    return path
