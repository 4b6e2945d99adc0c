"""Layouts with experts beside one process, the words they move, and what is planted to be found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.comm.world import World
from shoal.config import Config, load
from shoal.engine import Engine
from shoal.errors import LayoutError
from shoal.layout import Layout
from shoal.model.choice import Choice
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, make_model, materialise_alone, open_data
from shoal.train.verify import Report, verify

RUN = Path(__file__).parents[2] / "runs" / "tiny.toml"
SMALL = (
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn=48", "model.vocab=96",
    "model.experts=8", "model.expert_ffn=20", "model.shared_experts=1", "model.gate_renormalise=true",
    "model.balance_loss=0.05", "model.gate_z_loss=0.01", "data.seq_len=13", "data.batch=8", "optimizer.clip=0.1",
)  # fmt: skip
"""Odd lengths and widths; losses of the gate that show; clipping that acts, and dropout, as the file has them."""


def read(*more: str) -> Config:
    return load(RUN, [*SMALL, *more])


def agrees(report: Report) -> None:
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < 1e-9
    assert report.drift == 0.0


def exact(line: str) -> Layout:
    return Layout.parse(f"{line},dtype=float64")


@pytest.mark.parametrize("line", ["dp=2,ep=2", "tp=2,etp=2", "dp=2,tp=2,ep=4", "tp=4:2d,ep=2"])
def test_experts_over_ranks_compute_what_one_process_computes(line: str, pool: Pool) -> None:
    agrees(verify(read(), exact(line), pool, 2))


def words_moved(world: World, config: Config, layout: Layout) -> tuple[float, int, int, list[float], int]:
    """What a step moved for experts, and the pairs of tokens and experts that leave this rank, and those that stay."""
    engine = make_engine(config, layout, world)
    batch = open_data(config).batch(0, engine.mesh.coords["dp"], layout.dp)
    leave = stay = 0

    from shoal.expert import exchange

    of = exchange.Trip.of.__func__  # type: ignore[attr-defined]

    def counted(cls: type[exchange.Trip], choice: Choice, group: object, parts: int) -> exchange.Trip:
        nonlocal leave, stay
        trip: exchange.Trip = of(cls, choice, group, parts)
        leave += sum(trip.given)
        stay += len(trip.tokens) - sum(trip.given)
        return trip

    exchange.Trip.of = classmethod(counted)  # type: ignore[method-assign,assignment]
    try:
        world.ledger.clear()
        result = engine.step(batch)
    finally:
        exchange.Trip.of = classmethod(of)  # type: ignore[method-assign]
    assert result is not None
    assert result.experts is not None
    loads = [float(sum(one)) for one in result.experts.tokens.values()]
    return world.ledger.words(purpose="experts"), leave, stay, loads, config.model.hidden


@pytest.mark.parametrize(("line", "parts"), [("dp=2,ep=2", 1), ("dp=2,ep=2,mb=2", 1), ("dp=2,tp=2,ep=2,etp=2", 2)])
def test_only_what_leaves_moves_and_twice_each_way(line: str, parts: int, pool: Pool) -> None:
    """2 · (pairs of tokens and experts that leave) · h in the forward pass, and as many backward."""
    layout, config = exact(line), read("model.gate=softmax")
    seen = pool.run(words_moved, config, layout, ranks=layout.ranks)
    leaving, staying = sum(leave for _, leave, *_ in seen), sum(stay for _, _, stay, *_ in seen)
    hidden, tokens = config.model.hidden, config.data.batch * config.data.seq_len
    assert sum(words for words, *_ in seen) == 2 * 2 * leaving * hidden
    layers, k = config.model.layers, config.model.experts_per_token
    assert leaving + staying == layers * k * tokens * parts
    assert 0 < leaving < leaving + staying
    assert all(loads == [float(k * tokens)] * layers for *_, loads, _ in seen)


def routers_after(world: World, config: Config, layout: Layout, steps: int) -> list[torch.Tensor]:
    engine = make_engine(config, layout, world)
    for step in range(steps):
        engine.step(open_data(config).batch(step, engine.mesh.coords["dp"], layout.dp))
    engine.drain()
    return [one.router.weight.detach().clone() for one in engine.task.module.modules() if hasattr(one, "router")]


def test_routers_are_bit_equal_on_every_rank_after_twenty_steps(pool: Pool) -> None:
    layout = Layout.parse("dp=2,tp=2,ep=4,zero=1")
    first, *others = pool.run(routers_after, read(), layout, 20, ranks=4)
    assert len(first) == 2
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))


def balances(world: World, config: Config, layout: Layout) -> list[torch.Tensor]:
    engine = make_engine(config, layout, world)
    for step in range(3):
        engine.step(open_data(config).batch(step, engine.mesh.coords["dp"], layout.dp))
    return [buffer.clone() for buffer in engine.task.module.buffers()]


def test_the_bias_moves_one_step_against_each_excess_and_is_alike_everywhere(pool: Pool) -> None:
    config = read("model.gate=sigmoid", "model.bias_rate=0.01")
    ((alone, _),) = pool.run(balances, config, exact("dp=1"), ranks=1)
    assert set((alone / 0.01).round().abs().tolist()) <= {0.0, 1.0, 2.0, 3.0}
    assert alone.any()
    for rank in pool.run(balances, config, exact("dp=2,tp=2,ep=2,mb=2"), ranks=4):
        assert torch.equal(rank[0], alone)


def logits_of(world: World, config: Config, layout: Layout) -> torch.Tensor:
    """Those after a prompt and after a token that follows it, of a model whose gates are far from even."""
    engine = make_engine(config, layout, world)
    for name, parameter in engine.task.module.named_parameters():
        if "router" in name:
            parameter.detach().mul_(60)
    decode = engine.decoding()
    return torch.stack([decode(given) for given in ([7, 20, 33, 8, 90, 41], [3], [25])])


@pytest.mark.parametrize("gate", ["expert-choice", "sinkhorn"])
def test_a_text_is_generated_alike_where_positions_are_divided_in_training(gate: str, pool: Pool) -> None:
    """Then every rank has all tokens of the text: what a gate sees of it is not the sum over ranks."""
    config = read(f"model.gate={gate}")
    (alone,) = pool.run(logits_of, config, exact("dp=1"), ranks=1)
    for found in pool.run(logits_of, config, exact("cp=2,ep=2"), ranks=2):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-11)


def test_a_model_tells_logits_without_labels_while_it_records_gradients() -> None:
    """The losses of its gates are of positions that count, and none does."""
    config = read()
    model = make_model(config, exact("dp=1"))
    materialise_alone(model, 0)
    batch = {name: x for name, x in open_data(config).batch(0).items() if name != "labels"}
    ctx = model.context(batch)
    assert model(batch, ctx).requires_grad
    assert not ctx.beside.losses


def test_an_engine_refuses_a_bias_that_would_not_answer() -> None:
    model = make_model(read("model.gate=sigmoid"), exact("dp=1"))
    with pytest.raises(LayoutError, match="a gate's bias answers the load of the step before"):
        Engine(model, exact("sync=server{stale=1}"))
