from __future__ import annotations

from dataclasses import replace

import pytest
from decoder_ranks import TINY, TINY6, Case, assert_evaluates_alike, assert_trains_alike, name, run, tied, train
from families import FAMILIES, shape_of
from tensor_ranks import Contribution, assert_same, gradients, put_together, settled

from shoal.comm.world import World
from shoal.mesh import Grid
from shoal.meter import Meter
from shoal.model.roles import Kind, Role
from shoal.placement import Placement, holders
from shoal.tensor.one_d import OneD
from shoal.train.pool import Pool

MANY_QUERIES = TINY.model_copy(update={"kv_heads": 2, "layers": 2})

CASES = [
    Case(TINY, OneD(2)),
    Case(TINY, OneD(2, sequence=True)),
    Case(tied(TINY), OneD(4), 31),
    Case(tied(TINY), OneD(4, sequence=True), 31),
    Case(MANY_QUERIES, OneD(4), 5),
    Case(MANY_QUERIES, OneD(4, sequence=True), 5),
    Case(TINY6, OneD(2, sequence=True), 7),
    Case(tied(TINY6), OneD(3)),
    Case(tied(TINY6), OneD(3, sequence=True)),
    Case(TINY6, OneD(3, sequence=True), 2),
    Case(TINY, OneD(4, sequence=True), samples=1),
    Case(TINY, OneD(1, sequence=True), 5),
    Case(TINY6, OneD(3), 8, recompute=True),
    Case(TINY6, OneD(3, sequence=True), 8, recompute=True),
]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_decoder_computes_what_one_process_does(pool: Pool, case: Case) -> None:
    assert_trains_alike(pool, case)


FAMILY_CASES = {
    f"{family}-{'1d-sp' if sequence else '1d'}x{ranks}": Case(
        shape_of(family, z_loss=0.01, dropout=0.1, tied=sequence), OneD(ranks, sequence=sequence), length=13
    )
    for family in FAMILIES
    for ranks, sequence in ((2, False), (2, True), (4, True))
}


@pytest.mark.parametrize("case", FAMILY_CASES.values(), ids=FAMILY_CASES)
def test_every_family_computes_what_one_process_does(pool: Pool, case: Case) -> None:
    assert_trains_alike(pool, case)


@pytest.mark.parametrize(
    "case", [Case(TINY6, OneD(3), 7), Case(tied(MANY_QUERIES), OneD(4, sequence=True), 5)], ids=name
)
def test_without_gradients_the_loss_and_all_logits_are_on_every_rank(pool: Pool, case: Case) -> None:
    assert_evaluates_alike(pool, case)


# ---- several micro-batches under way -----------------------------------------------------------------------


def train_in_turns(world: World, case: Case, lengths: tuple[int, ...]) -> list[Contribution]:
    """All forward passes, then all backward passes, which run the layers again."""
    made, losses = case.divided(world), []
    for length in lengths:
        inputs = replace(case, length=length).batch()
        ctx = made.interpreter.localise(made.module.context(inputs), made.mesh.coords)
        losses.append(run(made, inputs, ctx, case.recompute))
    for loss in losses:
        loss.backward()
    return made.contributions()


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_micro_batches_under_way_together_may_differ_in_length(pool: Pool, recompute: bool) -> None:
    """As many positions on each rank, of which other numbers are padding."""
    case = Case(TINY6, OneD(3, sequence=True), recompute=recompute)
    model = case.alone().module
    for length in (8, 7):
        inputs = replace(case, length=length).batch()
        model(inputs, model.context(inputs)).backward()
    together = put_together(pool.run(train_in_turns, case, (8, 7), ranks=3))
    for key, wanted in gradients(model, model.roles).items():
        assert_same(together[key], wanted, key)


# ---- words moved -------------------------------------------------------------------------------------------


def words_of_training(world: World, case: Case) -> tuple[float, float]:
    train(world, case)
    return world.ledger.words("tp", "tensor"), world.ledger.words()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("sequence", "per_block"), [(False, 8), (True, 8 + 2)])
def test_words_moved_are_those_of_the_formula(pool: Pool, ranks: int, sequence: bool, per_block: int) -> None:
    """Per block four sums of M·h, each twice (P−1)/P of it; divided by positions also two gathers made again.
    Embedding and loss move as much as half a block, and the loss three numbers for each position of each other rank."""
    case = Case(MANY_QUERIES, OneD(ranks, sequence=sequence), length=6, samples=2)
    rows = 2 * (8 if sequence and ranks == 4 else 6)  # with the padding
    blocks = per_block * case.shape.layers + 4
    formula = blocks * (ranks - 1) / ranks * rows * case.shape.hidden + 3 * (ranks - 1) * rows
    assert pool.run(words_of_training, case, ranks=ranks) == [(formula, formula)] * ranks


def test_evaluation_moves_half_of_it_and_fetches_nothing_again(pool: Pool) -> None:
    case = Case(TINY6, OneD(2, sequence=True), length=6, samples=2)
    rows, hidden = 2 * 6, case.shape.hidden
    formula = (4 * case.shape.layers + 1 + 1) / 2 * rows * hidden + 3 * rows
    assert assert_evaluates_alike(pool, case) == [formula] * 2


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


def kept_by_blocks(world: World, case: Case, alone: bool) -> int:
    """Bytes that two blocks keep for the backward pass."""
    found = []
    for layers in (1, 3):
        some = replace(case, shape=case.shape.model_copy(update={"layers": layers}))
        made, inputs = some.alone() if alone else some.divided(world), case.batch()
        ctx = made.localise(made.module.context(inputs, train=True))
        with Meter() as meter:
            meter.label("parameters", made.module.parameters())
            with meter.phase("forward"):
                loss = made.module(inputs, ctx)
            found.append(settled(meter))
        del loss
    return found[1] - found[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallelism_divides_all_that_a_block_keeps(pool: Pool, ranks: int) -> None:
    case = Case(TINY, OneD(ranks, sequence=True))
    (whole,) = pool.run(kept_by_blocks, case, True, ranks=1)
    assert pool.run(kept_by_blocks, case, False, ranks=ranks) == [whole / ranks] * ranks
