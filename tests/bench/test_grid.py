from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bench.grid import ALONE, FIELDS, Field, Seen, main, measure, rows_of
from bench.grid_counts import Collectives, Counts, count
from bench.pairs import Clocks, Outcome
from bench.trainers import Case
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.config import Model
from shoal.train.pool import Pool

TINY = Model(layers=2, hidden=16, heads=4, kv_heads=4, ffn=24, vocab=32, tied=True)
FOUR = Field(4, 2, ("tp=4",))


def case(*, tied: bool) -> Case:
    return Case(TINY.model_copy(update={"tied": tied}), samples=4, seq_len=8, pairs=1)


@pytest.mark.parity
@pytest.mark.parametrize("tied", [False, True])
def test_all_do_the_same_and_dtensor_moves_what_its_placements_say(pool: Pool, tied: bool) -> None:
    """Rows q = columns q = 2, so that (q−1)/q² of an operand is a quarter; gathered operands are kept for backward."""
    seen = pool.run(measure, FOUR, case(tied=tied), ranks=4)
    names = {*FOUR.lines, *FOUR.peers, ALONE}
    assert all(rank.counts.keys() == rank.outcome.clocks.keys() == names for rank in seen)
    tokens, hidden, ffn, vocab, layers = 32, 16, 24, 32, 2
    norms, small = 2 * layers + 1, 2 * layers + 1 + 4 * layers + (1 if tied else 2)
    rest = norms * 2 * tokens // 2 + norms * hidden // 2 + 3 * tokens // 2 + 2 * 1.5 + small * 1.5
    linears = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 2 * ffn), (ffn, hidden))
    weights = 2 * (layers * sum(k * n for k, n in linears) + 2 * vocab * hidden) / 4
    inputs = 2 * tokens * (layers * sum(k for k, _ in linears) + 2 * hidden) / 4
    sums = 2 * tokens * (layers * 4 * hidden + 2 * hidden) / 4
    for rank in seen:
        assert rank.counts["DTensor 2x2, gathers"].words == weights + inputs + rest
        assert rank.counts["DTensor 2x2, sums"].words == weights + sums + rest
        assert rank.counts[ALONE].words == 0


def watched(world: World) -> list[float]:
    world.default_group()
    ledger, everyone, x = Ledger(), dist.group.WORLD, torch.ones(4, 6)
    mesh = init_device_mesh("cpu", (world.size,))
    part = DTensor.from_local(x, mesh, [Shard(0)])
    found = []
    with Collectives(ledger):
        for call in (
            lambda: dist.all_reduce(x),
            lambda: all_reduce(x, "sum", everyone).sum(),
            lambda: all_gather_tensor(x, 0, everyone).sum(),
            lambda: reduce_scatter_tensor(x, "sum", 0, everyone).sum(),
            lambda: part.redistribute(placements=[Replicate()]),
        ):
            before = ledger.words()
            call()
            found.append(ledger.words() - before)
    return found


def test_words_of_torch_collectives_are_counted_as_the_ledger_counts(pool: Pool) -> None:
    """24 elements a rank, on two ranks."""
    assert pool.run(watched, ranks=2) == [[24, 24, 24, 12, 24]] * 2


def held(world: World) -> Counts:
    world.default_group()
    mesh = init_device_mesh("cpu", (world.size,))
    kept, small = DTensor.from_local(torch.zeros(1000), mesh, [Shard(0)]), torch.zeros(10)

    def step(batch: dict[str, torch.Tensor]) -> tuple[float, float]:
        scratch = (kept + 1, torch.zeros(batch["size"].numel()))
        del scratch
        dist.all_reduce(small)
        return 0.0, 0.0

    return count(step, [{"size": torch.empty(size, device="meta")} for size in (5000, 100)])


def test_of_the_last_step_and_of_the_local_part_of_a_dtensor(pool: Pool) -> None:
    """float32 on each rank: 1000 that are kept, 1000 and 100 of scratch, and 10 that are reduced; earlier steps do not
    count."""
    for counts in pool.run(held, ranks=2):
        assert counts.words == 10
        assert counts.peak_bytes == pytest.approx(4 * 2110, abs=64)


def test_rows_tell_the_mean_of_words_the_most_of_bytes_and_seconds_above_the_same_turn() -> None:
    field = Field(2, 1, ())
    cpu = {ALONE: [1.0, 2.0, 3.0], "DTensor": [1.5, 2.5, 3.5]} | {peer: [3.0, 4.0, 5.0] for peer in field.peers}
    cpu["DTensor 2x1, sums"] = [2.0, 3.0, 4.0]

    def seen(words: float, peak: int) -> Seen:
        counts = {name: Counts(words, peak) for name in cpu}
        return Seen(Outcome({name: Clocks([1.0] * 3, clock) for name, clock in cpu.items()}, {}), counts)

    rows = {row.what: row for row in rows_of(field, [seen(10, 2**20), seen(20, 2**21)])}
    one = rows["DTensor 2x1, gathers"]
    assert (one.words, one.peak_mib, one.cpu_s, one.above_s) == (15, 2.0, 8.0, 4.0)
    assert (one.of_dtensor, one.of_fsdp2) == (2.0, 1.0)
    assert rows[ALONE].above_s == 0


def test_the_layouts_have_the_ranks_of_their_field() -> None:
    for field in FIELDS:
        assert {contest.layout.ranks for contest in field.ours.values()} == {field.ranks}


def test_a_wrong_number_of_turns_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--pairs", "-1"])
    assert "must be at least 1" in capsys.readouterr().err
