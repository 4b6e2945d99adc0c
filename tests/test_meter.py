from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from shoal.meter import ALL, HOST, Meter, cuda_peak, mark, mark_host


def test_a_known_sequence_has_its_exact_bytes_at_every_point() -> None:
    with Meter() as meter:
        a = torch.empty(8, 16)
        assert meter.live() == 512
        view = a[2:].t()
        assert meter.live() == 512
        a.mul_(2.0).add_(1.0)
        assert meter.live() == 512
        copy = view.reshape(-1)  # transposed, so it cannot be a view
        assert meter.live() == 512 + 6 * 16 * 4
        del a
        assert meter.live() == 512 + 384  # the view keeps the whole storage
        del view
        assert meter.live() == 384
        half = copy.to(torch.bfloat16)
        assert meter.live() == 384 + 192
        del copy, half
        assert meter.live() == 0
    assert meter.peak() == 512 + 384


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        (lambda: torch.zeros(5), 20),
        (lambda: torch.tensor([1.0, 2.0]), 8),
        (lambda: torch.arange(6), 48),
        (lambda: nn.Parameter(torch.ones(3)), 12),
        (lambda: torch.ones(4).expand(7, 4), 16),
        (lambda: torch.ones(4).split(2), 16),
        (lambda: torch.empty(3, 5, device="meta"), 60),
        (lambda: torch.add(torch.ones(4), 1, out=torch.empty(0)), 16),
        (lambda: torch.empty(2).resize_(9), 36),
        (lambda: torch.empty(3).untyped_storage().clone(), 12),
    ],
)
def test_whatever_makes_a_storage_is_seen(make, nbytes: int) -> None:
    with Meter() as meter:
        kept = make()
        assert meter.snapshot() == {"workspace": nbytes}
        del kept
        assert meter.snapshot() == {}


def test_relu_of_a_product_saves_its_result_alone_until_backward() -> None:
    x, w = torch.randn(32, 8), torch.randn(8, 24, requires_grad=True)
    with Meter() as meter:
        meter.label("params", [w])
        meter.label("batch", [x])
        with meter.phase("forward"):
            loss = torch.relu(x @ w).sum()
        assert meter.snapshot() == {"params": 8 * 24 * 4, "batch": 32 * 8 * 4, "activations": 32 * 24 * 4 + 4}
        with meter.phase("backward"):
            loss.backward()
        del loss
        assert w.grad is not None
        meter.label("grads", [w.grad])
        assert meter.snapshot() == {"params": 8 * 24 * 4, "batch": 32 * 8 * 4, "grads": 8 * 24 * 4}
    both = 2 * 32 * 24 * 4  # the product is alive until relu has read it
    assert meter.peaks()["forward"]["activations"] == both


def test_recompute_keeps_the_input_and_makes_the_rest_in_backward() -> None:
    def two_layers(h: Tensor) -> Tensor:
        return torch.exp(torch.exp(h))

    x = torch.randn(100, requires_grad=True)
    left = {}
    for recompute in (False, True):
        with Meter() as meter:
            with meter.phase("forward"):
                loss = (checkpoint(two_layers, x, use_reentrant=False) if recompute else two_layers(x)).sum()
            left[recompute] = meter.live("activations") - 4
            loss.backward()
            del loss
            assert meter.live("activations") == 0
            assert x.grad is not None
            assert meter.snapshot() == {"outside": 400, "workspace": x.grad.nbytes}
        x.grad = None
    assert left == {False: 800, True: 0}


class _Doubled(torch.autograd.Function):
    """Saves a tensor that nothing else holds, and makes another in its backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.full((50,), 2.0))
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (factor,) = ctx.saved_tensors
        return (grad[:, None] * factor).mean(1)


def test_custom_functions_and_hooks_are_seen_in_forward_and_in_backward() -> None:
    x = torch.ones(30, requires_grad=True)
    hooked = []
    with Meter() as meter:
        meter.label("params", [x])
        with meter.phase("forward"):
            y = _Doubled.apply(x)
            y.register_hook(lambda grad: hooked.append(grad.clone()))
        assert meter.live("activations") == 30 * 4 + 50 * 4
        with meter.phase("backward"):
            y.sum().backward()
        del y
        assert meter.snapshot() == {"params": 120, "workspace": 2 * 120}  # the gradient and the hook's copy
    assert meter.peaks()["backward"]["workspace"] >= 30 * 50 * 4


def test_composite_operations_show_their_parts_in_inference_mode() -> None:
    logits, labels = torch.randn(64, 50), torch.arange(50).repeat(2)[:64]
    with Meter() as meter, torch.inference_mode():
        meter.label("batch", [logits, labels])
        torch.nn.functional.cross_entropy(logits, labels)
    assert meter.peaks()[ALL]["workspace"] >= logits.nbytes  # their log-softmax, which no caller ever holds


@pytest.mark.parametrize("form", [{}, {"foreach": True}, {"fused": True}])
def test_adamw_holds_sixteen_bytes_a_parameter(form: dict[str, bool]) -> None:
    with Meter() as meter:
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
        params = list(model.parameters())
        meter.label("params", params)
        optimizer = torch.optim.AdamW(params, **form)
        with meter.phase("forward"):
            loss = model(torch.randn(5, 20)).square().mean()
        with meter.phase("backward"):
            loss.backward()
        meter.label("grads", [p.grad for p in params if p.grad is not None])
        with meter.phase("update"):
            optimizer.step()
        del loss
        state = optimizer.state.values()
        meter.label("optimizer", [s[moment] for s in state for moment in ("exp_avg", "exp_avg_sq")])
        n = 20 * 64 + 64 + 64 * 10 + 10
        steps = 4 * len(params)  # a float32 count of steps for each tensor
        assert meter.snapshot() == {"params": 4 * n, "grads": 4 * n, "optimizer": 8 * n, "workspace": steps}
        assert meter.live() - steps == 16 * n
        optimizer.zero_grad()
        assert meter.live("grads") == 0


def test_a_label_moves_a_whole_storage_and_tied_ones_count_once() -> None:
    weight = torch.ones(10, 10)
    meter = Meter()
    meter.label("params", [weight, weight.t(), weight[:3]])
    assert meter.snapshot() == {"params": 400}
    meter.label("frozen", [weight[5:]])
    assert meter.snapshot() == {"frozen": 400}
    assert meter.peaks() == {ALL: {"frozen": 400}}
    del weight
    assert meter.live() == 0
    assert meter.peak() == 400


def test_what_came_in_unseen_counts_as_outside_once_it_is_used() -> None:
    before = torch.ones(10)
    with Meter() as meter:
        borrowed = torch.frombuffer(bytearray(80), dtype=torch.float64)
        assert meter.live() == 0
        made = before + borrowed
        assert meter.snapshot() == {"outside": 120, "workspace": 80}
        assert torch.from_numpy(np.ones(2)).sum() == 2
        assert meter.live("workspace") == 80
    assert made.nbytes == 80


def test_peaks_are_kept_by_phase_and_an_outer_phase_covers_its_inner_one() -> None:
    with Meter() as meter:
        kept = torch.empty(100)
        with meter.phase("forward"):
            torch.empty(50)
            with meter.phase("recompute", "again"):
                torch.empty(200)
            torch.empty(10)
        with meter.phase("backward"):
            pass
        with meter.phase("forward"):  # a second visit, lower than the first
            pass
        del kept
    assert meter.peaks() == {
        ALL: {"workspace": 400, "again": 800},
        "forward": {"workspace": 400, "again": 800},
        "recompute": {"workspace": 400, "again": 800},
        "backward": {"workspace": 400},
    }
    assert (meter.peak(), meter.peak("backward")) == (1200, 400)
    with pytest.raises(KeyError):
        meter.peak("forwards")


def test_resizing_a_storage_in_place_frees_and_takes_its_bytes_at_once() -> None:
    with Meter() as meter:
        weight = torch.ones(100)
        meter.label("params", [weight])
        weight.untyped_storage().resize_(0)
        assert meter.live("params") == 0
        other = torch.ones(50)
        assert meter.peak() == 400  # not 600: the weight was gone
        weight.untyped_storage().resize_(400)
        assert meter.snapshot() == {"params": 400, "workspace": 200}
        torch.ops.inductor.resize_storage_bytes_(weight, 40)  # an operation, but one that returns nothing
        assert meter.live("params") == 40
    assert other.untyped_storage().resize_(8).nbytes() == 8
    assert meter.live("workspace") == 200, "a meter that was left still listens to resizes"


def test_leaving_stops_counting_what_is_new_but_not_what_dies() -> None:
    meter = Meter()
    with meter:
        first = torch.empty(10)
    second = torch.empty(10)
    assert meter.live() == first.nbytes
    del first, second
    assert meter.live() == 0


def test_meters_nest_and_each_counts_what_it_saw() -> None:
    with Meter() as outer:
        a = torch.empty(10)
        with Meter() as inner:
            b = torch.empty(5)
            b.untyped_storage().resize_(40)
        a.untyped_storage().resize_(4)
        assert (outer.live(), inner.live()) == (44, 40)


@pytest.mark.parametrize("meter_inside", [True, False])
def test_fake_tensors_count_as_if_they_were_real(meter_inside: bool) -> None:
    meter, fake = Meter(), FakeTensorMode()
    first, second = (fake, meter) if meter_inside else (meter, fake)
    with first, second:
        weight = torch.empty(1000, 1000, requires_grad=True)
        with meter.phase("forward"):
            loss = torch.relu(weight @ weight).sum()
        assert meter.snapshot() == {"workspace": 4_000_000, "activations": 4_000_004}
        loss.backward()
        del loss
        assert meter.live("activations") == 0
        assert weight.grad is not None
        assert meter.live() == 8_000_000


_CHANGES = st.tuples(st.sampled_from(["make", "view", "copy", "free", "resize"]), st.integers(0, 9), st.integers(0, 64))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(_CHANGES, max_size=40))
def test_live_bytes_are_those_of_the_distinct_storages_after_any_changes(changes: list[tuple[str, int, int]]) -> None:
    tensors: list[Tensor] = []
    most = 0
    with Meter() as meter:
        for change, at, size in changes:
            old = tensors[at % len(tensors)] if tensors else torch.empty(0)
            match change:
                case "make":
                    tensors.append(torch.empty(size, dtype=torch.uint8))
                case "view":
                    tensors.append(old.detach())
                case "copy":
                    tensors.append(torch.empty(old.untyped_storage().nbytes(), dtype=torch.uint8))
                case "free" if tensors:
                    del tensors[at % len(tensors)]
                case "resize":
                    old.untyped_storage().resize_(size)
            del old
            held = sum({id(s): s.nbytes() for s in map(Tensor.untyped_storage, tensors)}.values())
            assert meter.live() == held
            most = max(most, held)
    assert meter.peak() >= most


_RESIDENT = """
import json, os, torch
from shoal.meter import Meter

def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def highest():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))

torch.set_num_threads(1)
x = torch.full((1024, 1024), 0.5, requires_grad=True)
torch.tanh(x).sum().backward()  # what torch loads on first use is no tensor
x.grad = None
seen = []
with Meter() as meter:
    start = resident()
    meter.label("start", [x])
    base = meter.live()

    def compare():
        seen.append((resident() - start, meter.live() - base))

    with meter.phase("forward"):
        y = x
        for _ in range(64):
            y = torch.tanh(y)
        loss = y.sum()
        del y
    compare()
    other = [torch.ones(1 << 20) for _ in range(24)]
    compare()
    del other[::2]
    compare()
    loss.backward()
    compare()
    seen.append((highest() - start, meter.peak() - base))
print(json.dumps(seen))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_the_meter_agrees_with_the_growth_of_resident_memory() -> None:
    # A fixed threshold makes glibc return each block to the system when it is freed.
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run([sys.executable, "-c", _RESIDENT], env=environ, capture_output=True, text=True, check=True)
    seen = json.loads(run.stdout)
    mib = 1 << 20
    assert [round(metered / mib) for _, metered in seen] == [256, 352, 304, 52, 352]
    for resident, metered in seen:
        assert abs(resident - metered) <= 0.03 * metered + mib, seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_cuda_allocator_agrees_with_the_meter() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device)
    with Meter() as meter:
        x = torch.ones(1 << 20, device=device, requires_grad=True)
        torch.tanh(torch.tanh(x)).sum().backward()
    assert meter.peak() <= cuda_peak(device) - base <= 1.01 * meter.peak() + 4096


def test_the_resize_of_storages_is_as_torch_made_it_when_no_meter_runs() -> None:
    before = UntypedStorage.resize_
    with Meter():
        assert UntypedStorage.resize_ is not before
    assert UntypedStorage.resize_ is before


def test_what_is_on_the_host_is_told_by_what_it_is_for() -> None:
    with Meter() as meter:
        states, buffers = torch.zeros(100), torch.zeros(7)
        mark_host("states", states)
        mark(HOST, buffers)
        with meter.phase("most"):
            states.add_(1), buffers.add_(1)
        assert meter.host_parts() == meter.host_parts("most") == {"states": 400, "buffers": 28}
        assert meter.live(HOST) == meter.host_peak("most") == 428
        assert meter.live() == 0
        mark("parameters", states)
        del buffers
        states.add_(1)
        assert meter.host_parts() == {}
        assert (meter.live("parameters"), meter.live()) == (400, 400)
    assert meter.host_parts("most") == {"states": 400, "buffers": 28}
    assert meter.host_parts("never opened") == {}
