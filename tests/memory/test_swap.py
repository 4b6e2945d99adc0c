from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.memory.buffers import Buffers
from shoal.memory.swap import BLOCK, SECTOR, SwapFailed, SwapFile

SIZES = (SECTOR, BLOCK - SECTOR, BLOCK, 3 * BLOCK + 5 * SECTOR)
TOTAL = sum(SIZES)


@pytest.fixture
def buffers() -> Buffers:
    return Buffers()


@pytest.fixture(params=["direct", "buffered"])
def swap(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SwapFile]:
    if request.param == "buffered":
        monkeypatch.setattr(fcntl, "fcntl", _refusing(fcntl.fcntl))
    made = SwapFile(tmp_path, TOTAL)
    monkeypatch.undo()
    if request.param == "direct" and not made.direct:
        pytest.skip("this filesystem has no direct I/O")
    assert made.direct == (request.param == "direct")
    yield made
    made.close()


def _refusing(call: Callable[..., int]) -> Callable[..., int]:
    """A filesystem that has no direct I/O."""

    def fcntl_(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(descriptor, command, argument)

    return fcntl_


def filled(buffers: Buffers, nbytes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return buffers.take(nbytes).copy_(torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator))


def test_what_was_written_is_read_whatever_the_size_and_the_order(swap: SwapFile, buffers: Buffers) -> None:
    data = [filled(buffers, size, size) for size in SIZES]
    offsets = [sum(SIZES[:number]) for number in range(len(SIZES))]
    for transfer in [swap.write(at, one) for at, one in zip(offsets, data, strict=True)]:
        transfer.wait()
    into = [buffers.take(size) for size in SIZES]
    for transfer in [swap.read(at, one) for at, one in reversed(list(zip(offsets, into, strict=True)))]:
        transfer.wait()
        transfer.wait()
    assert all(torch.equal(one, other) for one, other in zip(data, into, strict=True))
    swap.write(offsets[2], data[1]).wait()
    whole = buffers.take(TOTAL)
    swap.read(0, whole).wait()
    data[2][: SIZES[1]] = data[1]
    assert torch.equal(whole, torch.cat(data))


def test_any_dtype_and_shape_and_what_wants_a_gradient(swap: SwapFile, buffers: Buffers) -> None:
    weight = filled(buffers, 2 * SECTOR, 0).view(torch.bfloat16).view(8, -1).requires_grad_()
    swap.write(SECTOR, weight).wait()
    read = buffers.take(2 * SECTOR).view(torch.int64)
    swap.read(SECTOR, read).wait()
    assert torch.equal(read.view(torch.uint8), weight.detach().view(-1).view(torch.uint8))


def test_the_mapping_shows_and_takes_what_the_file_holds(swap: SwapFile, buffers: Buffers) -> None:
    data = filled(buffers, BLOCK, 0)
    swap.write(SECTOR, data).wait()
    assert torch.equal(swap.mapping()[SECTOR : SECTOR + BLOCK], data)
    swap.mapping()[SECTOR] = data[0] ^ 255
    into = buffers.take(SECTOR)
    swap.read(SECTOR, into).wait()
    assert into[0] == data[0] ^ 255
    swap.write(SECTOR, data).wait()
    assert torch.equal(swap.mapping()[SECTOR : SECTOR + BLOCK], data)


def test_short_transfers_go_on_where_they_ended(
    swap: SwapFile, buffers: Buffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def short(call: Callable[..., int]) -> Callable[..., int]:
        def vector(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
            calls.append(offset)
            least = SECTOR if swap.direct else 100
            whole = len(parts[0]) // 3 // SECTOR * SECTOR
            return call(descriptor, [parts[0][: max(least, whole)]], offset)

        return vector

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, short(getattr(os, name)))
    data, into = filled(buffers, SIZES[3], 0), buffers.take(SIZES[3])
    swap.write(0, data).wait()
    swap.read(0, into).wait()
    assert torch.equal(data, into)
    assert len(calls) > 2 * SIZES[3] / BLOCK


def test_a_file_that_was_cut_is_told_and_not_read_as_zeros(swap: SwapFile, buffers: Buffers) -> None:
    into = buffers.take(TOTAL)
    for size in (3 * BLOCK, 3 * BLOCK + SECTOR + 17):
        os.ftruncate(swap._file.fileno(), size)
        with pytest.raises(SwapFailed, match=rf"ends at byte \d+ of {TOTAL}.*last checkpoint"):
            swap.read(0, into).wait()
        swap.read(0, into[: 3 * BLOCK]).wait()
    with pytest.raises(SwapFailed, match="ends at byte"):
        swap.mapping()


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "a disk with more room"), (errno.EIO, "check this disk")]
)
def test_a_full_or_broken_disk_is_told_when_every_part_has_ended(
    number: int, advice: str, swap: SwapFile, buffers: Buffers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, failed, ended = os.pwritev, threading.Event(), list[int]()

    def fails_at_the_start(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        if offset == 0:
            failed.set()
            raise OSError(number, os.strerror(number))
        failed.wait(5)
        ended.append(offset)
        return write(descriptor, parts, offset)

    monkeypatch.setattr(os, "pwritev", fails_at_the_start)
    with pytest.raises(SwapFailed, match=f"{tmp_path}.*cannot be written at byte 0.*{os.strerror(number)}.*{advice}"):
        swap.write(0, filled(buffers, SIZES[3], 0)).wait()
    assert len(ended) == SIZES[3] // BLOCK
    monkeypatch.undo()
    swap.write(0, filled(buffers, SIZES[3], 0)).wait()


def test_a_disk_without_room_is_found_at_once(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = len(os.listdir("/proc/self/fd"))
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, limit[1]))
    try:
        with pytest.raises(
            SwapFailed, match=f"{tmp_path}.*a swap file of [0-9.]+ [KM]iB cannot be had.*are free.*folder"
        ):
            SwapFile(tmp_path, 2 * BLOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not any(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SwapFailed, match=r"nowhere: no file can be made here: No such file"):
        SwapFile(tmp_path / "nowhere", BLOCK)


def test_nothing_is_left_behind_even_by_a_process_that_is_killed(tmp_path: Path) -> None:
    code = f"""
        import os, pathlib, signal
        from shoal.memory.buffers import Buffers
        from shoal.memory.swap import SwapFile
        swap = SwapFile(pathlib.Path({str(tmp_path)!r}), {TOTAL})
        swap.write(0, Buffers().take({TOTAL})).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, env=os.environ)
    assert run.returncode == -signal.SIGKILL
    assert not any(tmp_path.iterdir())


def test_its_space_is_taken_while_it_is_open(tmp_path: Path) -> None:
    swap = SwapFile(tmp_path, TOTAL)
    assert not any(tmp_path.iterdir())
    assert os.fstat(swap._file.fileno()).st_blocks * 512 >= TOTAL
    swap.close()
    with pytest.raises(ValueError, match="closed"):
        swap._file.fileno()
