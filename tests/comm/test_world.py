from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shoal.comm import world as world_module
from shoal.comm.collectives import all_reduce, barrier
from shoal.comm.point_to_point import start_receive, start_send
from shoal.comm.world import Group, World, any_shared, init, pick_device
from shoal.errors import ConfigError, RankFailed
from shoal.train.pool import Pool

LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "MASTER_ADDR",
          "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")  # fmt: skip
HOST = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}


def launched(patch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in LAUNCH:
        patch.delenv(name, raising=False)
    for name, value in variables.items():
        patch.setenv(name, value)


def test_a_process_that_nothing_launched_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch)
    with init() as world:
        assert (world.rank, world.size, world.device) == (0, 1, torch.device("cpu"))
        assert world.everyone == Group((0,), "world", 0, world.ledger, {})
        assert world.everyone.index == 0
        assert world.everyone.backend is None
    assert not dist.is_initialized()


@pytest.mark.parametrize("variables", [TORCHRUN, SLURM, {**SLURM, **TORCHRUN, "SLURM_PROCID": "0"}])
def test_the_launchers_variables_say_which_rank_this_is(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    """Torchrun's come first: it may itself have been started by Slurm."""
    launched(monkeypatch, **HOST, **variables, TORCHELASTIC_RESTART_COUNT="2")
    made = mock.Mock()
    monkeypatch.setattr(world_module.dist, "TCPStore", made.store)
    monkeypatch.setattr(world_module, "World", made.world)
    monkeypatch.setattr(world_module, "pick_device", lambda name, local: (name, local))
    init(device="auto", timeout_s=9)
    assert made.store.call_args.args == ("localhost", 29500)
    assert made.store.call_args.kwargs["is_master"] is False
    assert made.world.call_args.args == (3, 4, made.store.return_value)
    assert made.world.call_args.kwargs == {"device": ("auto", 1), "timeout_s": 9, "name": "shoal/2"}


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({**HOST, **TORCHRUN, "RANK": "x"}, "RANK = x: not a whole number"),
        ({**HOST, **TORCHRUN, "RANK": "4"}, "RANK = 4: not below WORLD_SIZE = 4"),
        ({**HOST, **SLURM, "SLURM_PROCID": "-1"}, "SLURM_PROCID = -1: not below SLURM_NTASKS"),
        ({**HOST, **TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT = http: not a whole number"),
        (TORCHRUN, "MASTER_ADDR and MASTER_PORT are not set"),
        ({**SLURM, "MASTER_ADDR": "localhost"}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({**HOST, "RANK": "1"}, "WORLD_SIZE"),
        ({**HOST, **TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT = 99999"),
    ],
)  # fmt: skip
def test_a_bad_launch_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], named: str
) -> None:
    launched(monkeypatch, **variables)
    with pytest.raises(ConfigError, match=named):
        init(timeout_s=0.1)


def test_each_rank_takes_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert pick_device("auto", 6) == pick_device("cuda", 2) == torch.device("cuda", 2)
    assert taken == [torch.device("cuda", 2)] * 2
    assert pick_device("cpu", 1) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto", 1) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"run\.device = cuda"):
        pick_device("cuda", 0)


def leave(world: World) -> None:
    """Close the world once every rank has entered it."""
    barrier(world.everyone)
    world.close()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def start_twice(world: World, port: str) -> list[float]:
    """The last rank stands for torchrun's agent, whose store outlives the others' first start."""
    leave(world)
    agent = world.size - 1
    if world.rank == agent:
        store = dist.TCPStore("localhost", int(port), is_master=True, wait_for_workers=False)
        store.wait([f"left {rank}" for rank in range(agent)], timedelta(seconds=20))
        return []
    found = []
    launch = {"RANK": str(world.rank), "WORLD_SIZE": str(agent), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for restart in range(2):
        again = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(restart)}
        with mock.patch.dict(os.environ, launch | again), init(timeout_s=10) as inner:
            ones = torch.ones(1)
            all_reduce(ones, inner.everyone, "test")
            found.append(ones.item())
    dist.TCPStore("localhost", int(port), wait_for_workers=False).set(f"left {world.rank}", "")
    return found


def test_ranks_meet_at_the_agents_store_and_again_after_a_restart(pool: Pool) -> None:
    assert pool.run(start_twice, free_port(), ranks=3) == [[2.0, 2.0], [2.0, 2.0], []]


def meet_without_agent(world: World, port: str) -> float:
    leave(world)
    launch = {"SLURM_PROCID": str(world.rank), "SLURM_NTASKS": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    with mock.patch.dict(os.environ, launch), init(timeout_s=10) as inner:
        ones = torch.ones(1)
        all_reduce(ones, inner.everyone, "test")
        barrier(inner.everyone)
        return ones.item()


def test_without_an_agent_rank_zero_serves_the_store(pool: Pool) -> None:
    assert pool.run(meet_without_agent, free_port(), ranks=2) == [2.0, 2.0]


def timeouts(world: World) -> list[Any]:
    sub = world.group((0, 1) if world.rank < 2 else (2, 3), "tp")
    assert world.group(sub.ranks, "tp").backend is sub.backend
    renamed = world.group(sub.ranks, "dp")
    assert (renamed.axis, renamed.backend) == ("dp", sub.backend)
    barrier(world.everyone)
    backends: list[Any] = [group.backend for group in (world.everyone, sub)]
    if world.carrier == "shared":
        return [timedelta(seconds=backend.links.timeout_s) for backend in backends]
    return [backend.group.options._timeout for backend in backends]


def test_every_group_has_the_runs_time_out(pool: Pool) -> None:
    assert pool.run(timeouts, timeout_s=77) == [[timedelta(seconds=77)] * 2] * 4


def cross(world: World) -> list[int]:
    """Two messages of one tag, each over a channel of its own, received in the other order than they are sent."""
    pair = world.everyone.ranks
    first, second = (world.group(pair, "pp", channel) for channel in ("first", "second"))
    assert len({world.everyone.backend, first.backend, second.backend}) == 3
    assert world.group(pair, "dp", "first").backend is first.backend
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    if world.rank == 0:
        messages = [start_send(torch.tensor([number]), group, 1, 0) for number, group in enumerate((first, second))]
    else:
        messages = [start_receive(one, group, 0, 0, "test") for one, group in zip(found, (second, first), strict=True)]
    for message in messages:
        message.wait()
    return [int(one.item()) for one in found]


def test_groups_of_the_same_ranks_are_apart_when_their_channels_differ(pool: Pool) -> None:
    assert pool.run(cross, ranks=2)[1] == [1, 0]


def wait_in_vain(world: World) -> None:
    pair = world.group((0, 1), "tp")
    if world.rank == 1:
        time.sleep(30)
    barrier(pair)


def test_a_collective_that_nobody_answers_fails_after_the_time_out(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 0 raised[\s\S]*[Tt]imed out"):
        pool.run(wait_in_vain, ranks=2, timeout_s=1)
    assert time.monotonic() - start < 10


def leave_twice(world: World) -> list[bool]:
    world.default_group()
    world.default_group()
    found = [dist.is_initialized()]
    barrier(world.group((0, 1), "tp"))
    leave(world)
    world.close()
    return [*found, dist.is_initialized()]


def leave_by_error(world: World, meeting: str) -> bool:
    leave(world)
    store = dist.FileStore(meeting, world.size)
    with suppress(ZeroDivisionError), World(world.rank, world.size, store, name="again", timeout_s=10) as inner:
        barrier(inner.everyone)
        raise ZeroDivisionError
    return dist.is_initialized()


def keep_default(world: World, meeting: str) -> bool:
    """A default group that was there before a world is there after it."""
    store = dist.FileStore(meeting, world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    try:
        world.default_group()
        world.close()
        return dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_default_group_of_somebody_else_outlives_the_world(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(keep_default, str(tmp_path / "store"), ranks=2) == [True, True]


def test_groups_end_with_their_world_even_when_it_ends_by_an_error(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(leave_twice, ranks=2) == [[True, False]] * 2
    assert pool.run(leave_by_error, str(tmp_path / "store"), ranks=2) == [False] * 2


class Gone:
    """A store that nobody serves any more."""

    def add(self, *_: object) -> int:
        raise RuntimeError("the store is gone")


def leave_while_the_store_fails(world: World, meeting: str) -> tuple[bool, int]:
    """Whether closing failed, and how many files it left open."""
    before, failed = len(os.listdir("/proc/self/fd")), False
    inner = World(world.rank, world.size, dist.FileStore(meeting, world.size), name="again", timeout_s=10)
    inner.hear_first("ready")
    barrier(inner.everyone)
    inner._store = Gone()  # type: ignore[assignment]
    try:
        inner.close()
    except RuntimeError:
        failed = True
    inner.close()
    return failed, len(os.listdir("/proc/self/fd")) - before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux lists them")
def test_what_a_world_has_open_is_closed_though_nobody_hears_its_last_word(pool: Pool, tmp_path: Path) -> None:
    left = pool.run(leave_while_the_store_fails, str(tmp_path / "store"), ranks=2)
    assert left == [(True, 0), (False, 0)]


def test_a_group_is_asked_for_by_its_members_in_order() -> None:
    with pytest.raises(AssertionError, match="is not in"):
        World().group((1,), "dp")
    with pytest.raises(AssertionError, match="ascend"):
        World().group((1, 0), "dp")


def places(world: World) -> tuple[int, int, int]:
    group = world.group((0, 2) if world.rank in (0, 2) else (1, 3), "dp")
    return group.rank, group.index, world.everyone.index


def test_a_group_knows_which_of_its_ranks_this_is(pool: Pool) -> None:
    assert pool.run(places, timeout_s=20) == [(0, 0, 0), (1, 0, 1), (2, 1, 2), (3, 1, 3)]


@pytest.mark.parametrize(("names", "shared"), [("abc", False), ("aba", True), ("aaa", True)])
def test_ranks_find_out_together_whether_two_have_the_same_gpu(names: str, shared: bool, tmp_path: Path) -> None:
    def ask(name: str) -> bool:
        return any_shared(name, dist.FileStore(str(tmp_path / "store"), len(names)), len(names))

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(ask, names)) == [shared] * len(names)
