"""The processes of one run, and the only place where process groups are made and destroyed.

A :class:`World` is what a launcher gives: this process's rank, how many there are, its device. Groups come from it
and die with it, so every one of them has the run's time-out and a name, and a finished run always destroys them
(a process that exits with groups open can end in SIGABRT after all its work is done).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.backends import Backend
from shoal.comm.backends.beside import Beside
from shoal.comm.backends.gloo import GlooGroup
from shoal.comm.backends.links import Links
from shoal.comm.backends.meeting import FOLDER
from shoal.comm.backends.nccl import NcclGroup
from shoal.comm.backends.shared import SharedGroup
from shoal.comm.ledger import Ledger
from shoal.comm.process import keep_freed_memory
from shoal.errors import ConfigError, setting

TIMEOUT_S = 600.0
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Group:
    """Some ranks that communicate, ``rank`` (this process) among them. ``axis`` names the mesh axes they span.

    Groups of the same ranks share what carries their messages out, unless their ``channel`` differs: what goes over one
    channel waits for nothing that goes over another.
    """

    ranks: tuple[int, ...]
    axis: str
    rank: int
    ledger: Ledger = field(repr=False, compare=False)
    backends: Mapping[tuple[tuple[int, ...], str], Backend] = field(repr=False, compare=False)
    channel: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This rank's place in the group."""
        return self.ranks.index(self.rank)

    @property
    def backend(self) -> Backend | None:
        """What carries messages; None for one rank alone. The world keeps it: what still refers to a group when the
        world has closed does not keep its threads alive."""
        if self.size == 1:
            return None
        key = self.ranks, self.channel
        assert key in self.backends, f"the group {self.ranks} is used after its world was closed"
        return self.backends[key]


class World:
    """This process among the ranks of a run.

    ``rank`` of ``size`` processes, ``device`` for its tensors, ``ledger`` for the words it receives. ``carrier`` says
    what carries messages: "nccl" between GPUs; between processors "shared" memory, where ranks have a machine in common
    and it will do, and "gloo" between machines, and where ranks share a GPU, which NCCL refuses. Use it as a context
    manager, or call :meth:`close`.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: dist.Store | None = None,
        *,
        device: torch.device | None = None,
        timeout_s: float = TIMEOUT_S,
        name: str = "shoal",
        share: bool = True,
    ) -> None:
        """``share`` says whether memory may be shared."""
        self.rank, self.size = rank, size
        self.device = device or torch.device("cpu")
        self.carrier = "nccl" if self.device.type == "cuda" else "gloo"
        self.ledger = Ledger()
        self._timeout = timedelta(seconds=timeout_s)
        self._backends: dict[tuple[tuple[int, ...], str], Backend] = {}
        self._store: dist.Store | None = None
        self._links: Links | None = None
        self._made_default = False
        self._heard = 0
        if size == 1:
            return
        assert store is not None, "several ranks need a store to meet at"
        # A prefix of its own per start: ranks restarted on a kept store would read their dead peers' addresses.
        self._store = dist.PrefixStore(name, store)
        self._store.set_timeout(self._timeout)
        if self.carrier == "nccl" and any_shared(_gpu(self.device), self._store, size):
            self.carrier = "gloo"
        elif self.carrier == "gloo" and share:
            self._links = self._join()
            self.carrier = "shared" if self._links else "gloo"
        if self.carrier == "nccl":
            self.default_group()
            self._backends[tuple(range(size)), ""] = NcclGroup(dist.group.WORLD, rank)
        try:
            everyone = self.everyone.backend
            assert everyone is not None
            everyone.barrier().wait()  # a rank that left at once would cut off peers that are still connecting
        except BaseException:
            self.close()
            raise

    def _join(self) -> Links | None:
        """The links to the ranks of this machine, if there are others."""
        assert self._store is not None
        self._store.set(f"machine/{self.rank}", machine())
        found = [self._store.get(f"machine/{rank}").decode() for rank in range(self.size)]
        here = tuple(rank for rank, name in enumerate(found) if name == found[self.rank])
        if len(here) == 1:
            return None
        store = dist.PrefixStore(f"machine/{here[0]}", self._store)
        return Links.join(self.rank, here, store, self._timeout.total_seconds())

    def default_group(self) -> None:
        """Make torch.distributed's own group of all ranks, for what cannot do without: NCCL, and libraries that call
        the functions of that module. All ranks call this."""
        if self._store is not None and not dist.is_initialized():
            nccl = self.carrier == "nccl"
            dist.init_process_group(
                "nccl" if nccl else "gloo",
                store=dist.PrefixStore("default", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=self._timeout,
                device_id=self.device if nccl else None,
            )
            self._made_default = True
            dist.barrier()

    def zeros(self, size: int, /, *, dtype: torch.dtype) -> Tensor:
        """A flat tensor, from which the ranks of this machine read fastest what is reduced or gathered of it. Its
        storage cannot be resized."""
        nbytes = size * dtype.itemsize
        memory = self._links.allocate(nbytes) if self._links and nbytes else None
        if memory is None:
            return torch.zeros(size, dtype=dtype, device=self.device)
        return torch.from_numpy(memory).view(dtype)

    @property
    def everyone(self) -> Group:
        """All ranks."""
        return self.group(tuple(range(self.size)), "world")

    def group(self, ranks: tuple[int, ...], axis: str, channel: str = "") -> Group:
        """The group over ``ranks`` (ascending, this rank among them), made at the first call by all its members."""
        assert self.rank in ranks, f"rank {self.rank} is not in {ranks}"
        assert list(ranks) == sorted(set(ranks)), f"ranks must ascend: {ranks}"
        if len(ranks) > 1 and (ranks, channel) not in self._backends:
            self._backends[ranks, channel] = self._connect(ranks, channel)
        return Group(ranks, axis, self.rank, self.ledger, self._backends, channel)

    def open_groups(self, wanted: Iterable[tuple[tuple[int, ...], str]]) -> None:
        """Make several groups, in one order on all ranks, so that overlapping groups cannot wait for each other."""
        for ranks, axis in sorted(set(wanted)):
            self.group(ranks, axis)

    def _connect(self, ranks: tuple[int, ...], channel: str) -> Backend:
        """Connect the members of a group, under a name that follows from its ranks and channel alone.

        ``dist.new_group`` would need every rank of the world to make every group; where it lets members meet by
        themselves, it names a group by how many each has made before, and overlapping groups wait for ever.
        """
        if self._links and self._links.reaches(ranks):
            return SharedGroup(self._links, ranks, channel)
        assert self._store is not None
        store = dist.PrefixStore(f"group/{channel}/" + "-".join(map(str, ranks)), self._store)
        place = ranks.index(self.rank)
        if self.carrier == "nccl":
            return NcclGroup.meet(store, place, len(ranks), self._timeout)
        group = GlooGroup(store, place, len(ranks), self._timeout)
        # While a rank waits for one of another machine, those of its own must not wait for it.
        return Beside(group, self._links.beside) if self._links else group

    def hear_first(self, said: str = "") -> str:
        """What the first rank says, ``said`` there; the others wait for it however long that takes. A collective would
        fail at the run's time-out."""
        if self._store is None:
            return said
        self._heard += 1
        key = f"said/{self._heard}"
        if self.rank == 0:
            self._store.set(key, said)
            return said
        wait = partial(self._store.wait, [key], timedelta(days=7))
        self._links.beside(wait) if self._links else wait()
        heard = bytes(self._store.get(key)).decode()
        self._store.add(f"heard/{self._heard}", 1)
        return heard

    def _until_heard(self) -> None:
        """The first rank may keep the store: the others have had what it said last before it goes."""
        assert self._store is not None
        deadline = time.monotonic() + _PATIENCE_S
        while self._store.add(f"heard/{self._heard}", 0) < self.size - 1 and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """Destroy every group. A second call does nothing."""
        if self._store is None:
            return
        with ExitStack() as last:  # each of these whatever becomes of the others
            if self._made_default:  # whoever has made it before is to end it
                last.callback(dist.destroy_process_group)
            if self._links:
                last.callback(self._links.close)
            for backend in self._backends.values():
                last.callback(backend.close)
            try:
                if self.rank == 0 and self._heard:
                    self._until_heard()
            finally:
                self._store = self._links = None
                self._backends.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # After a failure the groups may be unusable; the error already under way matters more.
            with suppress(RuntimeError):
                self.close()


def init(*, device: str = "cpu", timeout_s: float = TIMEOUT_S) -> World:
    """The world that a launcher describes: torchrun's or Slurm's environment variables, else one process alone.

    ``device`` is ``"cpu"``, ``"cuda"`` (each rank takes the GPU of its local rank) or ``"auto"`` (CUDA where there is
    one). Raises :class:`ConfigError` for a half-set or unreadable launch environment.
    """
    keep_freed_memory()
    rank, size, local = _launched()
    where = pick_device(device, local)
    if size == 1:
        return World(device=where, timeout_s=timeout_s)
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise ConfigError(
            f"{size} processes were started but MASTER_ADDR and MASTER_PORT are not set; "
            "start them with torchrun, or set both to the host and a free port of rank 0"
        )
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    number = _integer("MASTER_PORT", port)
    if not 0 < number < 1 << 16:
        raise ConfigError(setting("MASTER_PORT", port, "not a port", "use a free one from 1024 to 65535"))
    store = dist.TCPStore(
        address,
        number,
        world_size=size,
        is_master=rank == 0 and not agent_serves,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return World(rank, size, store, device=where, timeout_s=timeout_s, name=f"shoal/{start}")


def pick_device(name: str, local_rank: int) -> torch.device:
    """The device that ``name`` ("cpu", "cuda", "auto", or "cuda:0" for one GPU) means for one process of a host."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(setting("run.device", name, "this machine has no CUDA device", "use cpu or auto"))
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device(name) if ":" in name else torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def any_shared(mine: str, store: dist.Store, size: int) -> bool:
    """Whether two of ``size`` ranks, which all ask and name what is theirs, name the same; all get the same answer."""
    if store.add(f"theirs/{mine}", 1) > 1:
        store.add("shared", 1)
    if store.add("named", 1) == size:
        store.set("all named", "")
    store.wait(["all named"])
    return store.add("shared", 0) > 0


def machine() -> str:
    """A name that no other machine has, no container with other memory, and nobody else's process."""
    parts = [socket.gethostname(), str(os.getuid())]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(FOLDER.stat().st_dev)]
    return "/".join(parts)


def _gpu(device: torch.device) -> str:
    """A name that no other GPU has, on any host."""
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def _launched() -> tuple[int, int, int]:
    """(rank, size, local rank) from the environment; (0, 1, 0) when nothing launched this process."""
    env = os.environ
    for rank, size, local in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ):
        if (rank in env) != (size in env) and rank == "RANK":
            missing, there = (size, rank) if rank in env else (rank, size)
            raise ConfigError(
                setting(there, env[there], f"{missing} is not set", "set both, as torchrun does, or neither")
            )
        if rank in env and size in env:
            found = _integer(rank, env[rank]), _integer(size, env[size]), _integer(local, env.get(local, "0"))
            if not 0 <= found[0] < found[1]:
                raise ConfigError(setting(rank, env[rank], f"not below {size} = {env[size]}", "check the launcher"))
            return found
    return 0, 1, 0


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(setting(name, text, "not a whole number", "check the launcher")) from None
