from __future__ import annotations

from shoal.data.batch_size import BatchSize
from shoal.data.batches import Synthetic


def test_steps_follow_one_another_without_gaps() -> None:
    size = BatchSize(4, ((2, 6), (5, 3)))
    found = [size.at(step) for step in range(8)]
    assert [count for _, count in found] == [4, 4, 6, 6, 6, 3, 3, 3]
    assert [first for first, _ in found] == [0, 4, 8, 14, 20, 26, 29, 32]
    assert size.sizes() == [4, 6, 3]
    assert [BatchSize(5).at(step) for step in (0, 3)] == [(0, 5), (15, 5)]


def test_a_batch_that_grows_reads_the_samples_of_one_that_does_not() -> None:
    def samples(batch: int | BatchSize, steps: int) -> list[int]:
        source = Synthetic(vocab=9, seq_len=4, batch=batch, seed=0)
        return [number for step in range(steps) for number in source.batch(step)["sample"].tolist()]

    assert samples(BatchSize(2, ((3, 6),)), 5) == samples(3, 6) == list(range(18))
