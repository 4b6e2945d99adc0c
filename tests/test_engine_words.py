"""Words that a rank receives in a step of the decoder, by the ledger: the formulas of the papers, to the word.

N replicas, P tensor-parallel ranks, p stages; Ψ parameters of a rank; M positions of a rank's samples in a step; h
hidden size, V vocabulary. Sizes divide, so that nothing is padded, but where a test says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.comm.world import World
from shoal.config import Config, load
from shoal.engine import Engine
from shoal.layout import Layout
from shoal.mesh import Grid
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, open_data

RUNS = Path(__file__).parents[1] / "runs"
LAYERS, HIDDEN, VOCAB, KV_WIDTH, LENGTH, BATCH = 4, 64, 512, 32, 8, 24
POSITIONS = BATCH * LENGTH
NORMS = HIDDEN, 2 * HIDDEN
"""Parameters of the last norm, and of those of a block."""
BLOCK = HIDDEN * (HIDDEN + 2 * KV_WIDTH + HIDDEN) + 3 * HIDDEN * 160 + NORMS[1]
TABLE = VOCAB * HIDDEN
PSI = LAYERS * BLOCK + 2 * TABLE + NORMS[0]
UNEVEN = LAYERS * (4 * 48 * 48 + 3 * 48 * 50 + 2 * 48) + 2 * 259 * 48 + 48
"""Ψ of the model whose sizes nothing divides."""

Words = dict[str, float]


def read(run: str, *more: str) -> Config:
    return load(RUNS / f"{run}.toml", (f"model.layers={LAYERS}", f"data.seq_len={LENGTH}", *more))


def count(world: World, config: Config, line: str) -> tuple[Words, Words]:
    """Words of the first step, in which stages learn what they hand over and ranks compare their samples, and of one
    after it."""
    engine = make_engine(config, Layout.parse(f"{line},dtype=float64"), world)
    return step(engine, config), step(engine, config)


def step(engine: Engine, config: Config) -> Words:
    ledger = engine.world.ledger
    ledger.clear()
    engine.step(open_data(config).batch(engine.steps_done, engine.mesh.coords["dp"], engine.layout.dp))
    return ledger.table()


def received(pool: Pool, config: Config, line: str) -> list[Words]:
    """What each rank receives in a step."""
    found = pool.run(count, config, line, ranks=Layout.parse(line).ranks)
    for first, later in found:
        assert {key.partition("/")[2] for key in first.keys() - later.keys()} <= {"boundary header", "start"}
    return [later for _, later in found]


def ring(n: int) -> float:
    """(n − 1)/n: the share of a tensor that a rank receives in an all-gather or a reduce-scatter."""
    return (n - 1) / n


def exactly(words: Mapping[str, float]) -> object:
    return pytest.approx({key: n for key, n in words.items() if n}, rel=1e-12)


@pytest.mark.parametrize("line", ["dp=2,mb=4", "dp=4"])
def test_data_parallelism_moves_the_ring_all_reduce_whatever_the_accumulation(line: str, pool: Pool) -> None:
    n = Layout.parse(line).dp
    expected = {"dp/gradients": 2 * ring(n) * PSI} | dict.fromkeys(("dp/loss", "dp/weight", "world/norm"), 2 * ring(n))
    assert received(pool, read("tiny"), line) == [exactly(expected)] * n


def test_nothing_is_padded_in_an_all_reduce(pool: Pool) -> None:
    """At sizes that nothing divides."""
    for words in received(pool, read("tiny6"), "dp=3,mb=2"):
        assert words["dp/gradients"] == pytest.approx(2 * ring(3) * UNEVEN, rel=1e-12)


@pytest.mark.parametrize("line", ["dp=2,zero=1", "dp=4,zero=1,mb=2", "dp=4,zero=2,mb=6"])
def test_zero_1_and_2_move_no_more_than_an_all_reduce(line: str, pool: Pool) -> None:
    """2(N−1)/N·Ψ, half of it gradients and half parameters, also with accumulation."""
    n = Layout.parse(line).dp
    half = ring(n) * PSI
    expected = {"dp/gradients": half, "dp/parameters": half, "dp/loss": 2 * ring(n), "dp/weight": 2 * ring(n)}
    assert received(pool, read("tiny"), line) == [exactly({**expected, "world/norm": 2 * ring(n)})] * n


@pytest.mark.parametrize(("w", "servers", "more"), [(2, 1, ""), (4, 1, ",mb=2"), (4, 2, "{stale=2}")])
def test_a_server_receives_what_the_others_push(w: int, servers: int, more: str, pool: Pool) -> None:
    """(W−1)·Ψ/N of gradients and (N−1)/N·Ψ of parameters; another rank Ψ of parameters; together 2(W−1)·Ψ, as an
    all-reduce. One that is behind moves no more, from when it has something to apply."""
    found = received(pool, read("tiny"), f"dp={w},sync=server/{servers}{more}")
    for rank, words in enumerate(found):
        serves = rank < servers
        assert words["dp/gradients"] == ((w - 1) * PSI / servers if serves else 0)
        late = "stale" in more  # the second step of three that come before the first update
        assert words.get("dp/parameters", 0) == (0 if late else (servers - 1) * PSI / servers if serves else PSI)
        assert sum(n for key, n in words.items() if key not in ("dp/gradients", "dp/parameters")) < 16


@pytest.mark.parametrize(("line", "buckets"), [("dp=4,zero=1", 1), ("dp=4,zero=2", 1), ("dp=4,zero=3", 6)])
def test_zero_pads_each_bucket_by_less_than_a_word_a_rank(line: str, buckets: int, pool: Pool) -> None:
    for words in received(pool, read("tiny6"), line):
        assert ring(4) * UNEVEN <= words["dp/gradients"] < ring(4) * (UNEVEN + 4 * buckets)


@pytest.mark.parametrize(("n", "mb"), [(2, 1), (4, 1), (2, 3)])
def test_zero_3_gathers_parameters_for_each_pass_and_sends_gradients_after_it(n: int, mb: int, pool: Pool) -> None:
    """3(N−1)/N·Ψ a micro-batch, less what is not gathered again where passes meet: of the last layer between forward
    and backward, of the first between micro-batches."""
    first, last = TABLE, TABLE + NORMS[0]
    gathered = mb * (2 * PSI - last) - (mb - 1) * first
    expected = {
        "dp/gradients": mb * ring(n) * PSI,
        "dp/parameters": ring(n) * gathered,
        "dp/loss": 2 * ring(n),
        "dp/weight": 2 * ring(n),
        "world/norm": 2 * ring(n),
    }
    assert received(pool, read("tiny"), f"dp={n},zero=3,mb={mb}") == [exactly(expected)] * n


@pytest.mark.parametrize("line", ["dp=2,zero=3/1", "dp=4,zero=3/2"])
def test_zero_in_groups_gathers_inside_them_and_sums_across(line: str, pool: Pool) -> None:
    layout = Layout.parse(line)
    inside, across = layout.zero_group or 1, layout.dp // (layout.zero_group or 1)
    for words in received(pool, read("tiny"), line):
        share = PSI / inside
        assert words["dp/gradients"] == pytest.approx(ring(inside) * PSI + 2 * ring(across) * share, rel=1e-12)
        gathered = ring(inside) * (2 * PSI - TABLE - NORMS[0])
        assert words.get("dp/parameters", 0.0) == pytest.approx(gathered, rel=1e-12)


@pytest.mark.parametrize(("n", "mb"), [(2, 4), (4, 2)])
def test_zero_3_that_keeps_parameters_for_a_step_moves_as_much_as_stage_1(n: int, mb: int, pool: Pool) -> None:
    """2(N−1)/N·Ψ, however many micro-batches add up."""
    for words in received(pool, read("tiny"), f"dp={n},zero=3{{keep=step}},mb={mb}"):
        assert words["dp/gradients"] == words["dp/parameters"] == pytest.approx(ring(n) * PSI, rel=1e-12)


def packed(buckets: Sequence[int], parts: int) -> int:
    """Bytes of one of the ``parts`` of each bucket as int8 blocks of 256 with a scale in float32."""
    return sum(-(-bucket // parts // 256) * 260 for bucket in buckets)


@pytest.mark.parametrize(
    "line", ["dp=2,zero=1", "dp=4,zero=2/2,mb=2", "dp=2,zero=3,mb=2", "dp=4,zero=3/2", "dp=4,zero=3/2{keep=step},mb=2"]
)
def test_int8_blocks_move_a_byte_a_word_and_their_scales(line: str, pool: Pool) -> None:
    """65/256 of the bytes of float32. Inside a group each rank receives a part from each other (N−1 of N parts), per
    gather and per sum; across the groups its part of a part twice, as an exchange and a gather."""
    layout = Layout.parse(line)
    size = layout.zero_group or layout.dp
    across, twice = layout.dp // size, layout.zero == 3 and not layout.keep_params
    first, last = TABLE, TABLE + NORMS[0]
    buckets = [first, *[BLOCK] * LAYERS, last] if layout.zero == 3 else [PSI]
    one = packed(buckets, size)
    gathered, sums = one, 1
    if twice:  # for each pass, but where passes meet
        gathered, sums = 2 * layout.mb * one - layout.mb * packed([last], size), layout.mb
        gathered -= (layout.mb - 1) * packed([first], size)
    of_part = packed([bucket // size for bucket in buckets], across) if across > 1 else 0
    rounded = str(replace(layout, int8_gather=True, int8_reduce=True))
    for words in received(pool, read("tiny"), rounded):
        moved = sum(n for key, n in words.items() if key.endswith("gradients int8"))
        assert moved == sums * (size - 1) * one + 2 * (across - 1) * of_part
        assert words["dp/parameters int8"] == (size - 1) * gathered
        assert "dp/gradients" not in words
        assert "dp/parameters" not in words


def tensor_words(
    ranks: int, positions: int, *, sequence: bool, blocks: int = LAYERS, loss: bool = True, embed: bool = True
) -> float:
    """Activations: a block enters and leaves twice each way; the embedding and the loss once each. A row of the loss
    takes three words from each other rank."""
    entries = blocks * (10 if sequence else 8) + 2 * embed + 2 * loss
    return entries * ring(ranks) * positions * HIDDEN + loss * 3 * (ranks - 1) * positions


@pytest.mark.parametrize(("ranks", "more"), [(2, ""), (4, ",mb=2"), (8, "")])
def test_tensor_parallelism_moves_8_activations_a_block(ranks: int, more: str, eight: Pool) -> None:
    """8(P−1)/P·M·h (Shoeybi et al. 2019): four all-reduces. With 8 ranks and 4 key/value heads, pairs of ranks sum the
    gradients of the one they share."""
    pairs = 2 * ring(2) * LAYERS * 2 * HIDDEN * KV_WIDTH / 4 if ranks == 8 else 0.0
    expected = {
        "tp/tensor": tensor_words(ranks, POSITIONS, sequence=False),
        "tp/gradients": pairs,
        "world/norm": 2 * ring(ranks),
    }
    assert received(eight, read("tiny"), f"tp={ranks}{more}") == [exactly(expected)] * ranks


@pytest.mark.parametrize(("ranks", "length"), [(2, 8), (4, 8), (4, 6)])
def test_sequence_parallelism_moves_at_most_2_activations_a_block_more(ranks: int, length: int, pool: Pool) -> None:
    """An all-reduce becomes a reduce-scatter and a gather (Korthikanti et al. 2022); the inputs of two linears are
    gathered again in the backward pass instead of being kept. Positions are padded to a multiple of the ranks. The
    norms' gradients are summed."""
    padded = BATCH * -(-length // ranks) * ranks
    expected = {
        "tp/tensor": tensor_words(ranks, padded, sequence=True),
        "tp/gradients": 2 * ring(ranks) * (NORMS[0] + LAYERS * NORMS[1]),
        "world/norm": 2 * ring(ranks),
    }
    found = received(pool, read("tiny", f"data.seq_len={length}"), f"tp={ranks}:1d-sp")
    assert found == [exactly(expected)] * ranks


QUERY, LATENT, TURNED = 24, 16, 4
LATENTS = f"model.latent={{rank={LATENT}, query_rank={QUERY}, plain_dim=6, turned_dim={TURNED}, value_dim=8}}"
WIDTH = QUERY + LATENT + TURNED


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["1d", "1d-sp"])
def test_latents_enter_for_all_heads_in_place_of_the_stream(kind: str, ranks: int, pool: Pool) -> None:
    """Of the input of attention, h wide, nothing moves. 1-D sums the gradients of latents; with sequence parallelism
    they are gathered and not again, where an input of h would be, and their gradients divided. What makes them is on
    all ranks, each with positions of its own, and its gradients are summed as those of norms are."""
    config, sequence = read("tiny", "model.kv_heads=8", LATENTS), kind == "1d-sp"
    ways = 3 if sequence else 2
    instead = LAYERS * POSITIONS * ring(ranks) * (2 * WIDTH - ways * HIDDEN)
    alike = NORMS[0] + LAYERS * (NORMS[1] + HIDDEN * WIDTH + QUERY + LATENT)
    expected = {
        "tp/tensor": tensor_words(ranks, POSITIONS, sequence=sequence) + instead,
        "tp/gradients": 2 * ring(ranks) * alike if sequence else 0.0,
        "world/norm": 2 * ring(ranks),
    }
    assert received(pool, config, f"tp={ranks}:{kind}") == [exactly(expected)] * ranks


@pytest.mark.parametrize("line", ["pp=2:gpipe,mb=4", "pp=4:1f1b,mb=6", "pp=3:1f1b{layers=2/1/1},mb=2"])
def test_a_pipeline_moves_one_boundary_tensor_a_micro_batch_each_way(line: str, pool: Pool) -> None:
    """And a header of eleven words with the first activation, never again."""
    layout = Layout.parse(line)
    found = pool.run(count, read("tiny"), line, ranks=layout.pp)
    for stage, (first, later) in enumerate(found):
        edges = (stage > 0) + (stage < layout.pp - 1)
        expected = {"pp/boundary": edges * POSITIONS * HIDDEN, "pp/loss": 2 * ring(layout.pp)}
        expected["world/norm"] = 2 * ring(layout.pp)
        assert later == exactly(expected)
        assert first.pop("pp/start") < 8
        assert first == exactly({**expected, "pp/boundary header": 11 * (stage > 0)})


@pytest.mark.parametrize(("zero", "mb"), [(0, 4), (1, 1), (2, 1), (2, 4), (3, 4)])
def test_zero_in_a_pipeline_moves_no_more_with_more_micro_batches(zero: int, mb: int, pool: Pool) -> None:
    """2(N−1)/N·Ψ of the stage, also under stage 3, whose parameters stay gathered for the step."""
    found = received(pool, read("tiny"), f"dp=2,pp=2{{layers=2/2}},zero={zero},mb={mb}")
    for rank, words in enumerate(found):
        psi = 2 * BLOCK + TABLE + (NORMS[0] if rank >= 2 else 0)
        moved = words["dp/gradients"], words.get("dp/parameters", 0.0)
        assert moved == pytest.approx((psi, 0) if zero == 0 else (psi / 2, psi / 2), rel=1e-12)


@pytest.mark.parametrize(
    ("line", "gradients"),
    [
        ("pp=2,mb=2", {"pp/gradients": TABLE}),
        ("pp=3,mb=2", {"pp/gradients": TABLE}),
        ("dp=2,pp=2,mb=2", {"pp·dp/gradients": 1.5 * TABLE, "dp/gradients": 2 * BLOCK}),
        ("dp=2,pp=2,zero=1", {"pp/gradients": TABLE / 2, "dp/gradients": (2 * BLOCK + TABLE) / 2}),
        ("tp=2,pp=2", {"pp/gradients": TABLE / 2}),
    ],
)
def test_a_tied_embedding_is_summed_once_between_the_first_and_the_last_stage(
    line: str, gradients: Words, pool: Pool
) -> None:
    layout = Layout.parse(line)
    for rank, words in enumerate(received(pool, read("tiny", "model.tied=true"), line)):
        stage = Grid(layout.axes).coords(rank)["pp"]
        expected = dict(gradients)
        if stage == layout.pp - 1 and "dp/gradients" in expected:
            expected["dp/gradients"] += NORMS[0] * (0.5 if layout.zero else 1.0)
        if 0 < stage < layout.pp - 1:
            expected = {}
        assert {key: n for key, n in words.items() if key.endswith("gradients")} == exactly(expected)


HIDDEN_MATRICES = LAYERS * (BLOCK - NORMS[1])
"""Parameters that Muon updates."""


@pytest.mark.parametrize(
    ("line", "held"), [("dp=2", 2), ("dp=4,mb=2", 4), ("tp=2", 1), ("tp=4:1d-sp", 1), ("dp=2,tp=2", 2), ("pp=2", 1)]
)
def test_muon_brings_a_matrix_to_one_rank_and_its_update_to_all_who_hold_it(line: str, held: int, pool: Pool) -> None:
    """Over all ranks, where each has 1/P of every hidden matrix and ``held`` are all the copies: (P − 1)/P go to the
    owner, and held − 1/P come back. Nothing else of a step changes."""
    layout = Layout.parse(line)
    share = 1 / layout.tp
    muon = received(pool, read("tiny", "optimizer.name=muon"), line)
    assert sum(words.pop("world/muon", 0) for words in muon) == HIDDEN_MATRICES * (1 - share + held - share)
    assert muon == received(pool, read("tiny"), line)


@pytest.mark.parametrize(("zero", "cut"), [(1, 0), (3, LAYERS * 1024)])
def test_muon_moves_under_zero_what_a_cut_matrix_has_beyond_the_cut(zero: int, cut: int, pool: Pool) -> None:
    """There and back. The halves of four layers cut no matrix, and the half of one layer cuts its gate: of the 21,504
    elements in it, q, k, v and out are 12,288, and 9,216 are the gate's, of 10,240."""
    found = received(pool, read("tiny", "optimizer.name=muon"), f"dp=2,zero={zero}")
    assert sum(words["world/muon"] for words in found) == 2 * cut


def test_every_word_of_all_of_them_together(eight: Pool) -> None:
    """Two replicas of two stages, each on two ranks with sequence parallelism, ZeRO stage 1, three micro-batches."""
    config, line = read("tiny"), "dp=2,tp=2:1d-sp,pp=2:1f1b{layers=3/1},zero=1,mb=3"
    positions, grid = POSITIONS // 2, Grid(Layout.parse(line).axes)
    for rank, words in enumerate(received(eight, config, line)):
        last = grid.coords(rank)["pp"]
        blocks, norms = (1, NORMS[0] + NORMS[1]) if last else (3, 3 * NORMS[1])
        psi = (blocks * (BLOCK - NORMS[1]) + TABLE) / 2 + norms
        tensor = tensor_words(2, positions, sequence=True, blocks=blocks, loss=bool(last), embed=not last)
        expected = {
            "tp/tensor": tensor,
            "pp/boundary": positions // 2 * HIDDEN,
            "dp/gradients": psi / 2,
            "dp/parameters": psi / 2,
            "tp/gradients": 2 * ring(2) * norms / 2,  # of its half of each norm
            "dp/weight": 1.0,
            "pp·dp/loss": 1.5,
            "world/norm": 2 * ring(8),
        }
        assert words == exactly(expected), f"rank {rank}"
