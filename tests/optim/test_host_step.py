from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import cpp_extension

from shoal.optim import host
from shoal.optim import native as building
from shoal.optim.host import Update, host_adamw, native, plain
from shoal.optim.native import NotBuilt, library

LR, BETAS, EPS, FACTOR = 3e-3, (0.9, 0.95), 1e-8, 0.37
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
GRADS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small, and threads that wait for each other take long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["native", "plain"])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Update], None]:
    if request.param == "plain":
        monkeypatch.setattr(host, "PIECE", 1000)
        return plain
    found = native()
    if found is None:
        pytest.skip("there is no compiler, no ninja, or no library came of them")
    return found


def flat(numel: int, dtype: torch.dtype, at: int = 0) -> Tensor:
    """Zeros that begin ``at`` elements after where an allocation does."""
    return torch.zeros(numel + at, dtype=dtype)[at:]


@pytest.mark.parametrize("grads_in", GRADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("numel", "at", "decay"), [(1003, 0, 0.1), (4099, 3, 0.0), (1, 1, 0.1)])
def test_a_hundred_steps_are_adamws(
    step: Callable[[Update], None], dtype: torch.dtype, grads_in: torch.dtype, numel: int, at: int, decay: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = nn.Parameter(torch.randn(numel, dtype=dtype, generator=generator))
    optimizer = torch.optim.AdamW([reference], lr=LR, betas=BETAS, eps=EPS, weight_decay=decay, foreach=False)
    params, exp_avg, exp_avg_sq = (flat(numel, dtype, at) for _ in range(3))
    params.copy_(reference.detach())
    grads, half = flat(numel, grads_in, at), flat(numel, torch.bfloat16, at)
    for number in range(1, 101):
        grads.copy_(torch.randn(numel, dtype=dtype, generator=generator) * 10 ** (number % 5 - 3))
        given = grads.clone()
        reference.grad = grads.to(dtype) * FACTOR
        optimizer.step()
        step(Update(params, grads, exp_avg, exp_avg_sq, LR, BETAS, EPS, decay, number, FACTOR, half))
        assert torch.equal(grads, given)
    state = optimizer.state[reference]
    for found, right in ((params, reference.detach()), (exp_avg, state["exp_avg"]), (exp_avg_sq, state["exp_avg_sq"])):
        assert (found - right).abs().max() <= TOLERANCE[dtype] * max(1.0, right.abs().max().item())
    assert torch.equal(half, params.bfloat16())


def test_both_steps_agree_from_any_count_and_for_any_betas(step: Callable[[Update], None]) -> None:
    numel = 5000
    start = [torch.rand(numel) for _ in range(3)]
    found, right = ([one.clone() for one in start] for _ in range(2))
    for betas in ((0.9, 0.999), (0.3, 0.4), (0.0, 0.5)):
        for run, (params, exp_avg, exp_avg_sq) in ((step, found), (plain, right)):
            run(Update(params, torch.ones(numel), exp_avg, exp_avg_sq, LR, betas, EPS, 0.1, 1234, FACTOR))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("half_in", [torch.bfloat16, torch.float16])
def test_the_copy_is_rounded_to_nearest_ties_to_even(step: Callable[[Update], None], half_in: torch.dtype) -> None:
    every = torch.arange(-(1 << 31), 1 << 31, 1 << 12).int()  # ties of both kinds, subnormals, infinities, NaN
    params = torch.cat([every - 1, every, every + 1]).view(torch.float32)
    half = torch.empty_like(params, dtype=half_in)
    zeros = torch.zeros_like(params)
    step(Update(params, zeros, zeros.clone(), zeros.clone(), 0.0, BETAS, EPS, 0.0, 1, 1.0, half))
    torch.testing.assert_close(half, params.to(half_in), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("grads_in", [torch.bfloat16, torch.float16])
def test_every_gradient_in_half_precision_is_read_right(step: Callable[[Update], None], grads_in: torch.dtype) -> None:
    grads = torch.arange(-(1 << 15), 1 << 15).short().view(grads_in)
    grads = grads[grads.isfinite()]
    params, exp_avg, exp_avg_sq = (torch.zeros(len(grads)) for _ in range(3))
    step(Update(params, grads, exp_avg, exp_avg_sq, LR, (0.0, 0.5), EPS, 0.0, 1))
    assert torch.equal(exp_avg, grads.float())


def test_threads_do_not_change_the_result(step: Callable[[Update], None]) -> None:
    grads = torch.randn(100_003)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        params, exp_avg, exp_avg_sq = (torch.ones_like(grads) for _ in range(3))
        step(Update(params, grads, exp_avg, exp_avg_sq, LR, BETAS, EPS, 0.1, 1))
        found.append(params)
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found[0], found[2], rtol=1e-6, atol=1e-7)


def test_without_a_compiler_the_plain_step_is_taken_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: "no-such-compiler")
    _takes_the_plain_step(monkeypatch)
    assert not caplog.messages


def test_where_building_fails_the_plain_step_is_taken_and_a_warning_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(source: Path) -> None:
        raise NotBuilt("building host_step.cpp with c++ failed: error: expected ';'", tried=True)

    monkeypatch.setattr(host, "library", fails)
    _takes_the_plain_step(monkeypatch)
    assert "expected ';'" in caplog.text


def _takes_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Update] = []
    monkeypatch.setattr(host, "plain", taken.append)
    native.cache_clear()
    try:
        ones = [torch.ones(3) for _ in range(4)]
        host_adamw(*ones, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, step=7, factor=FACTOR)
    finally:
        native.cache_clear()
    assert [(update.step, update.factor, update.half) for update in taken] == [(7, FACTOR, None)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what is built."""
    if native() is None:
        pytest.skip("there is no compiler, no ninja, or no library came of them")
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path / "built"))
    return tmp_path


def test_a_library_is_built_once_and_again_when_its_source_or_the_processor_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder / "one_number.cpp"
    source.write_text('extern "C" int number() { return 1; }')
    assert library(source).number() == 1
    (first,) = (folder / "built").glob("*.so")
    changed = first.stat().st_mtime_ns
    assert library(source).number() == 1
    assert first.stat().st_mtime_ns == changed
    source.write_text('extern "C" int number() { return 2; }')
    assert library(source).number() == 2
    monkeypatch.setattr(building, "_processor", lambda: "another")
    library(source)
    assert len(list((folder / "built").glob("*.so"))) == 3


def test_source_that_does_not_compile_is_told_with_the_compilers_words_and_leaves_nothing(folder: Path) -> None:
    source = folder / "broken.cpp"
    source.write_text("int number() { return nothing; }")
    with pytest.raises(NotBuilt, match=r"(?s)broken.cpp with .* failed.*nothing") as caught:
        library(source)
    assert caught.value.tried
    assert {path.suffix for path in (folder / "built").iterdir()} == {".lock"}
