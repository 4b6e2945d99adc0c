from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, shape_of
from tensor_ranks import Array, Contribution, Divided, assert_same, batch, divide, gradients, put_together, whole
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.comm.world import World
from shoal.config import Model, load
from shoal.local import Interpreter
from shoal.mesh import Grid
from shoal.meter import Meter
from shoal.model.context import Cache
from shoal.model.decoder import Decoder, decoder_roles
from shoal.model.roles import Kind, Role
from shoal.placement import Placement, holders
from shoal.tensor.one_d import OneD
from shoal.tensor.whole import Whole
from shoal.train.pool import Pool

RUNS = Path(__file__).parents[2] / "runs"
TINY, TINY6 = (load(RUNS / f"{name}.toml").model for name in ("tiny", "tiny6"))
MANY_QUERIES = TINY.model_copy(update={"kv_heads": 2, "layers": 2})


@dataclass(frozen=True)
class Case:
    """A decoder and a batch on ``ranks`` ranks."""

    shape: Model
    ranks: int
    sequence: bool
    length: int = 32
    samples: int = 3
    recompute: bool = False

    def divided(self, world: World) -> Divided:
        interpreter = OneD(world.size, sequence=self.sequence)
        return divide(partial(Decoder, self.shape), decoder_roles(self.shape), interpreter, world)

    def whole(self) -> Any:
        return whole(partial(Decoder, self.shape), decoder_roles(self.shape))

    def batch(self) -> dict[str, Tensor]:
        return batch(self.shape.vocab, self.samples, self.length)


def run(model: Any, inputs: dict[str, Tensor], ctx: Any, recompute: bool) -> Tensor:
    x = inputs["tokens"]
    for _, layer in model.layers():
        x = checkpoint(layer, x, ctx, use_reentrant=False) if recompute else layer(x, ctx)
    return x


def train(world: World, case: Case) -> tuple[float, list[Contribution]]:
    made, inputs = case.divided(world), case.batch()
    ctx = made.interpreter.localise(made.module.context(inputs, seed=1, step=2, train=True), made.group)
    loss = run(made.module, inputs, ctx, case.recompute)
    (loss * 0.01).backward()
    return loss.item(), made.contributions()


def expected(case: Case) -> tuple[float, dict[str, Array]]:
    model, inputs = case.whole(), case.batch()
    loss = model(inputs, model.context(inputs, seed=1, step=2, train=True))
    (loss * 0.01).backward()
    return loss.item(), gradients(model, model.roles)


def tied(shape: Model) -> Model:
    return shape.model_copy(update={"tied": True})


CASES = [
    Case(TINY, 2, False),
    Case(TINY, 2, True),
    Case(tied(TINY), 4, False, 31),
    Case(tied(TINY), 4, True, 31),
    Case(MANY_QUERIES, 4, False, 5),
    Case(MANY_QUERIES, 4, True, 5),
    Case(TINY6, 2, True, 7),
    Case(tied(TINY6), 3, False, 32),
    Case(tied(TINY6), 3, True, 32),
    Case(TINY6, 3, True, 2),
    Case(TINY, 4, True, 32, samples=1),
    Case(TINY, 1, True, 5),
    Case(TINY6, 3, False, 8, recompute=True),
    Case(TINY6, 3, True, 8, recompute=True),
]


def name(case: Case) -> str:
    kind = f"{'1d-sp' if case.sequence else '1d'}x{case.ranks}{'-recomputed' if case.recompute else ''}"
    return f"{case.shape.heads}-heads-{'tied-' if case.shape.tied else ''}{kind}-{case.samples}x{case.length}"


def agrees(pool: Pool, case: Case) -> None:
    """The loss and all gradients. One that is zero in exact arithmetic, as of a key's bias where positions are learned,
    is rounding beside those of the whole model."""
    loss, wanted = expected(case)
    ranks = pool.run(train, case, ranks=case.ranks)
    for found, _ in ranks:
        assert_same(found, loss, "loss")
    assert len({found for found, _ in ranks}) == 1, "every rank has the same loss, to the last bit"
    together = put_together(contributions for _, contributions in ranks)
    assert together.keys() == wanted.keys()
    rms = np.sqrt(np.mean(np.concatenate([one.ravel() for one in wanted.values()]) ** 2))
    for key, gradient in wanted.items():
        assert_same(together[key], gradient, key, floor=rms if key.endswith("attn.k.bias") else 0.0)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_decoder_computes_what_one_process_does(pool: Pool, case: Case) -> None:
    agrees(pool, case)


FAMILY_CASES = {
    f"{family}-{'1d-sp' if sequence else '1d'}x{ranks}": Case(
        shape_of(family, z_loss=0.01, dropout=0.1, tied=sequence), ranks, sequence, length=13
    )
    for family in FAMILIES
    for ranks, sequence in ((2, False), (2, True), (4, True))
}


@pytest.mark.parametrize("case", FAMILY_CASES.values(), ids=FAMILY_CASES)
def test_every_family_computes_what_one_process_does(pool: Pool, case: Case) -> None:
    agrees(pool, case)


# ---- forward alone -----------------------------------------------------------------------------------------


def forward(world: World, case: Case) -> tuple[float, Array, list[Array], float]:
    """The loss of an evaluation, the logits, those of a prompt and of single positions after it, and what the first of
    these moved."""
    made, inputs = case.divided(world), case.batch()
    with torch.no_grad():
        ctx = made.interpreter.localise(made.module.context(inputs), made.group)
        loss = made.module(inputs, ctx).item()
        words = world.ledger.words("tp", "tensor")
        inputs.pop("labels")
        logits = made.module(inputs, made.interpreter.localise(made.module.context(inputs), made.group))
        return loss, logits.numpy(), decode(made.module, inputs["tokens"]), words


def decode(model: Decoder, tokens: Tensor) -> list[Array]:
    cache = Cache()
    steps = [tokens[:, :3], tokens[:, 3:4], tokens[:, 4:5]]
    return [model.decode(step, cache).detach().numpy() for step in steps]


@pytest.mark.parametrize("case", [Case(TINY6, 3, False, 7), Case(tied(MANY_QUERIES), 4, True, 5)], ids=name)
def test_without_gradients_the_loss_and_all_logits_are_on_every_rank(pool: Pool, case: Case) -> None:
    model, inputs = case.whole(), case.batch()
    with torch.no_grad():
        loss = model(inputs, model.context(inputs)).item()
        inputs.pop("labels")
        logits = model(inputs, model.context(inputs)).numpy()
        steps = decode(model, inputs["tokens"])
    for found, all_logits, some_logits, _ in pool.run(forward, case, ranks=case.ranks):
        assert_same(found, loss)
        assert_same(all_logits, logits)
        for one, wanted in zip(some_logits, steps, strict=True):
            assert_same(one, wanted)


# ---- words moved -------------------------------------------------------------------------------------------


def words_of_training(world: World, case: Case) -> tuple[float, float]:
    train(world, case)
    return world.ledger.words("tp", "tensor"), world.ledger.words()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("sequence", "per_block"), [(False, 8), (True, 8 + 2)])
def test_words_moved_are_those_of_the_formula(pool: Pool, ranks: int, sequence: bool, per_block: int) -> None:
    """Per block four sums of M·h, each twice (P−1)/P of it; divided by positions also two gathers made again.
    Embedding and loss move as much as half a block, and the loss three numbers for each position of each other rank."""
    case = Case(MANY_QUERIES, ranks, sequence, length=6, samples=2)
    rows = 2 * (8 if sequence and ranks == 4 else 6)  # with the padding
    blocks = per_block * case.shape.layers + 4
    formula = blocks * (ranks - 1) / ranks * rows * case.shape.hidden + 3 * (ranks - 1) * rows
    assert pool.run(words_of_training, case, ranks=ranks) == [(formula, formula)] * ranks


def test_evaluation_moves_half_of_it_and_fetches_nothing_again(pool: Pool) -> None:
    case = Case(TINY6, 2, True, length=6, samples=2)
    rows, hidden = 2 * 6, case.shape.hidden
    formula = (4 * case.shape.layers + 1 + 1) / 2 * rows * hidden + 3 * rows
    assert [words for _, _, _, words in pool.run(forward, case, ranks=2)] == [formula] * 2


# ---- where parameters lie ----------------------------------------------------------------------------------

WORLD = Grid((("pp", 2), ("dp", 3), ("cp", 1), ("tp", 4)))


def placed(role: Role, parameter: str, shape: tuple[int, ...], sequence: bool = False) -> list[Placement]:
    """At each coordinate on the tensor axis."""
    rule = OneD(4, sequence=sequence).place(role, "blocks.0.it", parameter, shape)
    found = [rule.at({"pp": 1, "dp": 2, "cp": 0, "tp": at}) for at in range(4)]
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


def spans(placements: list[Placement], dim: int) -> list[list[tuple[int, int]]]:
    return [[piece.box[dim] for piece in one.pieces] for one in placements]


QKV = Role("qkv", parts=(("q", 24), ("k", 6), ("v", 6)), heads=8, kv_heads=2)


def test_query_heads_divide_and_a_key_value_head_is_on_the_ranks_whose_queries_read_it() -> None:
    for shape in ((36, 10), (36,)):
        found = placed(QKV, "weight" if len(shape) == 2 else "bias", shape)
        assert [one.shape for one in found] == [(12, *shape[1:])] * 4
        assert [piece.name for piece in found[0].pieces] == [
            f"blocks.0.{part}.{'weight' if len(shape) == 2 else 'bias'}" for part in "qkv"
        ]
        keys = [(0, 3), (0, 3), (3, 6), (3, 6)]
        assert spans(found, 0) == [[(6 * at, 6 * at + 6), key, key] for at, key in enumerate(keys)]
        assert [piece.at[0] for piece in found[1].pieces] == [(0, 6), (6, 9), (9, 12)]
        assert not found[0].duplicated


def test_gradients_of_a_shared_key_value_head_are_summed_over_its_ranks_and_replicas() -> None:
    rule = OneD(4).place(QKV, "blocks.0.qkv", "weight", (36, 10))
    queries, keys, values = holders(rule, WORLD, WORLD.coords(WORLD.rank({"pp": 1, "dp": 0, "cp": 0, "tp": 3})))
    assert keys == values
    line = [WORLD.rank({"pp": stage, "dp": dp, "cp": 0, "tp": 3}) for stage in range(2) for dp in range(3)]
    assert queries.summing == queries.copies == tuple(line)
    assert keys.summing == keys.copies == tuple(sorted([*line, *(rank - 1 for rank in line)]))


@pytest.mark.parametrize("kind", ["out_proj", "down"])
def test_second_linears_divide_by_columns_and_keep_their_bias_whole(kind: Kind) -> None:
    role = Role(kind, heads=8 if kind == "out_proj" else 0)
    found = placed(role, "weight", (10, 24))
    assert spans(found, 1) == [[(6 * at, 6 * at + 6)] for at in range(4)]
    assert spans(found, 0) == [[(0, 10)]] * 4
    for sequence in (False, True):
        for one in placed(role, "bias", (10,), sequence):
            assert one.shape == (10,)
            assert one.duplicated == (frozenset() if sequence else {"tp"})


def test_what_does_not_divide_is_uneven_and_never_padded() -> None:
    found = placed(Role("gate_up", parts=(("gate", 50), ("up", 50))), "weight", (100, 10))
    assert spans(found, 0) == [[span, span] for span in ((0, 13), (13, 26), (26, 38), (38, 50))]
    assert [one.shape for one in found] == [(26, 10), (26, 10), (24, 10), (24, 10)]
    assert spans(placed(Role("down"), "weight", (10, 50)), 1) == [[gate] for gate, _ in spans(found, 0)]
    embedding, head = (placed(Role(kind), "weight", (259, 10)) for kind in ("embed", "head"))
    assert spans(embedding, 0) == [[(0, 65)], [(65, 130)], [(130, 195)], [(195, 259)]]
    assert [one.pieces[0].box for one in head] == [one.pieces[0].box for one in embedding]


@pytest.mark.parametrize(("kind", "alike"), [("norm", True), ("replicated", True), ("head_norm", False)])
def test_what_is_whole_on_every_rank_repeats_work_where_the_ranks_see_the_same(kind: Kind, alike: bool) -> None:
    """A norm inside attention sees its rank's heads alone."""
    for sequence in (False, True):
        for one in placed(Role(kind), "weight", (10,), sequence):
            assert one.pieces[0].box == ((0, 10),)
            assert one.duplicated == ({"tp"} if alike and not sequence else frozenset())


# ---- memory ------------------------------------------------------------------------------------------------


def kept_by_blocks(world: World, case: Case, interpreter: Interpreter) -> int:
    """Bytes that two blocks keep for the backward pass."""
    found = []
    for layers in (1, 3):
        shape = case.shape.model_copy(update={"layers": layers})
        made = divide(partial(Decoder, shape), decoder_roles(shape), interpreter, world)
        inputs = case.batch()
        ctx = made.interpreter.localise(made.module.context(inputs, train=True), made.group)
        with Meter() as meter:
            meter.label("parameters", made.module.parameters())
            with meter.phase("forward"):
                loss = made.module(inputs, ctx)
            found.append(meter.live("activations"))
        del loss
    return found[1] - found[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallelism_divides_all_that_a_block_keeps(pool: Pool, ranks: int) -> None:
    case = Case(TINY, ranks, True)
    (alone,) = pool.run(kept_by_blocks, case, Whole(), ranks=1)
    assert pool.run(kept_by_blocks, case, OneD(ranks, sequence=True), ranks=ranks) == [alone / ranks] * ranks
