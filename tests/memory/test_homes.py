"""Tensors that live on the device, the host or a disk answer alike, and give back what they borrow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.build import swap_of
from shoal.layout import Layout
from shoal.memory import filesystem as filesystem_module
from shoal.memory.homes import DeviceHome, DiskHome, Homes, HostHome
from shoal.purposes import STATES

SIZE = 1500
"""Elements, of which no page holds a whole number."""


@pytest.fixture
def homes(tmp_path: Path) -> Homes:
    made = Homes(torch.device("cpu"), tmp_path)
    made.reserve([4 * SIZE, 2 * SIZE])
    return made


def kept(homes: Homes, where: str, values: torch.Tensor) -> DeviceHome | HostHome | DiskHome:
    if where == "device":
        return homes.on_device(SimpleNamespace(tensor=values.clone()))
    return homes.keep(where, values, STATES)


@pytest.mark.parametrize("where", ["device", "cpu", "nvme"])
def test_what_is_written_on_the_host_is_found_at_home(where: str, homes: Homes) -> None:
    first = torch.randn(SIZE)
    one = kept(homes, where, first)
    lent = len(homes._buffers._lent)
    one.begin()
    one.begin()
    assert torch.equal(one.here(), first)
    one.here().mul_(2)
    one.end()
    one.settle()
    assert torch.equal(one.view(), 2 * first)
    one.blank().copy_(first)
    one.end()
    one.settle()
    room = torch.empty(SIZE)
    one.lift(room).wait()
    one.settle()
    assert torch.equal(room, first)
    one.lower(3 * first)
    one.settle()
    assert torch.equal(one.view(), 3 * first)
    assert len(homes._buffers._lent) == lent == 0


@pytest.mark.parametrize("where", ["device", "nvme"])
def test_what_only_goes_is_not_taken_home(where: str, homes: Homes) -> None:
    first = torch.randn(SIZE)
    one = kept(homes, where, first)
    one.begin()
    one.here().zero_()
    one.end(changed=False)
    one.settle()
    assert torch.equal(one.view(), first)


def test_what_is_written_to_a_view_of_the_disk_is_read_from_it(homes: Homes) -> None:
    one, other = (
        homes.keep("nvme", torch.ones(SIZE, dtype=dtype), STATES) for dtype in (torch.float32, torch.bfloat16)
    )
    one.view().fill_(2)
    other.view().fill_(3)
    for each, value in ((one, 2), (other, 3)):
        each.begin()
        assert each.here().eq(value).all()
        each.end(changed=False)
        each.settle()


def test_sums_on_the_host_add_up(homes: Homes) -> None:
    one = homes.keep("cpu", torch.zeros(SIZE), STATES)
    parts = torch.randn(3, SIZE)
    for number, part in enumerate(parts):
        one.lower(part, add=number > 0)
    assert torch.equal(one.here(), parts[0] + parts[1] + parts[2])
    assert not homes._buffers._lent


def test_the_first_rank_warns_once_of_a_folder_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(filesystem_module, "_filesystem", lambda _: "tmpfs")
    for line, first, told in (
        ("offload=optimizer:cpu", True, 0),
        ("offload=optimizer:nvme", False, 0),
        ("offload=optimizer:nvme", True, 1),
        ("offload=activations:nvme", True, 1),
    ):
        assert swap_of(Layout.parse(line), tmp_path, first=first) == tmp_path
        assert len(caplog.messages) == told, line
    assert f"memory.swap = {tmp_path}: is a tmpfs" in caplog.text
