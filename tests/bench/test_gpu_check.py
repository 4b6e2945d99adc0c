from __future__ import annotations

import pytest
import torch

from bench import gpu_check
from shoal.config import load
from shoal.layout import Layout
from shoal.train.pool import Pool


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu_check.main() == 0
    assert "There is no GPU here: nothing was checked." in capsys.readouterr().out


@pytest.mark.parametrize("line", gpu_check.LINES)
def test_what_it_compares_agrees_on_the_cpu(line: str, pool: Pool) -> None:
    config = load(gpu_check.TINY, ["model.dropout=0", "model.layers=4"])
    (truth,) = pool.run(gpu_check.few_steps, config, "dtype=float32", ranks=1)
    found = pool.run(gpu_check.few_steps, config, line, ranks=Layout.parse(line).ranks)[0]
    for at in (0, 1):
        assert gpu_check._worst([one[at] for one in found], [one[at] for one in truth]) < gpu_check.TOLERANCE["float32"]


def test_the_share_of_the_peak() -> None:
    """A billion parameters beside the table, at 100,000 tokens a second, take 600 TFLOP/s, and attention 40 more."""
    speed = gpu_check.Speed("NVIDIA H200", 10**9 + 32_000 * 2048, 1e5, 0.0)
    assert speed.mfu == pytest.approx((6e14 + 1e5 * 6 * 16 * 2048 * 2048) / 989e12)
    assert gpu_check.Speed("unheard of", 10**9, 1e5, 0.0).mfu is None
