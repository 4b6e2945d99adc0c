"""What every way of keeping replicas equal has in common: one way in for gradients, and one order of going out.

Every gradient enters through :class:`Main`. A bucket is sent once the Program's last backward pass has completed all
of its units, and always in the same order on all ranks, so a parameter that no sample of this rank used cannot make
ranks disagree about which collective is next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from shoal.comm.collectives import Pending, start_all_gather, start_all_reduce
from shoal.comm.world import Group
from shoal.data_parallel.buckets import Bucket, build_buckets
from shoal.data_parallel.entry import Contribution, Later, Main, late, main_of, take_in
from shoal.data_parallel.flat import Flat, is_open, open_
from shoal.data_parallel.norm import Norm
from shoal.data_parallel.run_lists import runs_of
from shoal.data_parallel.sharing import Sharing
from shoal.data_parallel.shelves import AnyShelf
from shoal.data_parallel.stowage import on_host, reserve
from shoal.data_parallel.visits import Visits
from shoal.errors import ConfigError
from shoal.local import LocalParameter, settle
from shoal.mesh import Mesh
from shoal.model.linear import attach_sink
from shoal.optim.runs import Run
from shoal.optim.treatment import Treat
from shoal.placement import Fragment


class Sync:
    """Keeps the main gradients of ``trained`` parameters. When :meth:`finish` is done, what :meth:`runs` shows the
    optimizer are their sums over all replicas. ``treat`` says how the optimizer treats each.

    Subclasses say how a bucket is sent (:meth:`_send`) and how the sums are completed (:meth:`finish`).
    """

    def __init__(
        self,
        trained: Sequence[LocalParameter],
        frozen: Sequence[LocalParameter],
        treat: Treat,
        mesh: Mesh,
        sharing: Sharing,
    ) -> None:
        self._mesh, self._sharing = mesh, sharing
        self.on_host = partial(on_host, sharing.away)
        self._divide = sharing.divider(mesh.grid, mesh.world.rank)
        divisions = [self._divide(who) for one in (*trained, *frozen) for who in one.holders]
        mesh.open_groups({ranks for each in divisions for ranks in (each.shard, each.cross)})
        for ranks in sorted({each.cross for each in divisions if each.across_stages}):
            mesh.group(ranks, "stages")
        self.flats: list[Flat] = []
        self._mains: list[Main] = []
        self.later = Later()
        self._of_bucket: list[list[Main]] = []
        buckets = build_buckets(trained, self._divide, treat, sharing.cap_bytes)
        idle = () if sharing.keep_params else frozen
        frozen_buckets = build_buckets(idle, self._divide, treat, sharing.cap_bytes)
        reserve(sharing.away, buckets, frozen_buckets)
        for number, bucket in enumerate(buckets):
            flat = self._flat(bucket)
            self.flats.append(flat)
            mains = [main_of(slot, number, flat, self.make_ready, self.later) for slot in bucket.slots]
            self._mains += mains
            self._of_bucket.append(mains)
            flat.release_whole()  # so that no more than one is whole that will not stay so
        # Frozen parameters are divided if parameters are; else each has memory of its own.
        self.frozen_flats: list[Flat] = []
        self.frozen = list(frozen) if sharing.keep_params else []
        for one in self.frozen:
            settle(one)
        for bucket in frozen_buckets:
            self.frozen_flats.append(self._flat(bucket, trains=False))
            self.frozen_flats[-1].release_whole()
        self._shards = [mesh.group(flat.bucket.shard) for flat in (*self.flats, *self.frozen_flats)]
        # Stages come to what they share at times of their own, between what they exchange with each other besides.
        self._crosses = [
            [(slice(start, stop), mesh.group(division.cross, "stages" if division.across_stages else ""))
             for start, stop, division in flat.bucket.own_ranges() if len(division.cross) > 1]
            for flat in self.flats
        ]  # fmt: skip
        self._of_unit: dict[int, list[Main]] = defaultdict(list)
        self._used_by: dict[int, list[Main]] = defaultdict(list)
        for main in self._mains:
            self._of_unit[main.held.unit].append(main)
            for unit in main.held.units:
                self._used_by[unit].append(main)
            main.held.parameter.main = main  # type: ignore[attr-defined]
            if (main.buffered or sharing.split_backward) and main.held.parameter.ndim == 2:
                attach_sink(main.held.parameter, main)
        self._units_done: set[int] = set()
        self._sent: set[int] = set()
        self._visits: Visits | None = None
        self.filling = 0
        """Of two places for gradients, the one in which they add up now."""
        self.norm = Norm(self.flats, mesh)
        self.set_up()

    def set_up(self) -> None:
        """Make what a subclass has besides, once buckets and groups are there."""

    def _flat(self, bucket: Bucket, *, trains: bool = True) -> Flat:
        sharing = self._sharing
        return Flat(
            bucket,
            keep_params=sharing.keep_params,
            keep_grads=sharing.keep_grads,
            half_grads=sharing.half_grads,
            masters=sharing.masters,
            versions=sharing.versions or (sharing.int8_gather and sharing.keep_params),
            trains=trains,
            zeros=self._mesh.world.zeros,
            away=sharing.away,
        )

    def come_and_go(self, uses: Mapping[int, Sequence[str]], *, resident: bool) -> None:
        """From here on parameters that are not kept whole come and go with the units that use them."""
        flats = [*self.flats, *self.frozen_flats]
        self._visits = Visits(flats, self._shards, uses, self._start_gather, resident=resident)

    @property
    def must_see(self) -> bool:
        """Whether parameters come and go with the units that use them."""
        return self._visits is not None

    # ---- a step, in the order in which it happens

    def begin(self) -> None:
        """Start a step: nothing has entered, whatever a step that failed half-way has left."""
        self._units_done.clear()
        self._sent.clear()
        self.norm.begin()
        self.later.forget()
        for main in self._mains:
            main.begin()
        if self._visits is not None:
            self._visits.begin()

    def postpone(self, kept: list[Contribution] | None) -> None:
        """Contributions to weights' gradients, of those that can wait, are ``kept`` until None is."""
        self.later.settle()
        self.later.kept = kept

    def enter_unit(self, unit: int, backward: bool) -> None:
        """The parameters of ``unit`` are about to be used."""
        if self._visits is not None:
            self._visits.enter(unit, backward)

    def leave_unit(self, unit: int) -> None:
        """The forward pass of ``unit`` is over."""
        if self._visits is not None:
            self._visits.leave(unit)

    def unit_done(self, unit: int, final: bool) -> None:
        """A backward pass has completed the gradients of ``unit``: take them in. If no pass will follow (``final``),
        send each bucket whose units all are complete."""
        self._take_from(unit, final)
        if self._visits is not None:
            self._visits.done(unit, final)

    def _take_from(self, unit: int, final: bool) -> None:
        self.later.settle()
        take_in(self._used_by[unit])
        if not final:
            self._between_passes(unit)
            return
        self._units_done.add(unit)
        for number in sorted({main.bucket for main in self._used_by[unit]}):
            if self.flats[number].bucket.units <= self._units_done:
                self._complete(number)

    def _between_passes(self, unit: int) -> None:
        """Another pass will add to the gradients of ``unit``."""

    @property
    def units(self) -> tuple[int, ...]:
        """Those whose gradients it keeps, in the order of a backward pass."""
        return tuple(sorted(self._used_by, reverse=True))

    def reduce(self, units: Iterable[int]) -> None:
        """Every gradient of ``units`` has entered: send what has not been sent."""
        for unit in units:
            if unit not in self._units_done:
                self.unit_done(unit, final=True)
        for main in self._mains:
            if main.bucket in self._sent and not main.settled:
                raise late(main)

    def depart(self) -> None:
        """Begin to sum what several stages share; :meth:`finish` does, where nobody has."""

    def turn(self) -> None:
        """The gradients of a batch are on their way; those of the next add up apart from them, where those of the one
        before have been."""
        self._swap()
        self.filling = 1 - self.filling
        self._units_done.clear()
        self._sent.clear()
        for main in self._mains:
            main.entered = False

    @contextmanager
    def view(self, place: int) -> Iterator[None]:
        """The batch that was ``filling`` this place is in view, for :meth:`finish` and the optimizer."""
        other = place != self.filling
        if other:
            self._swap()
        try:
            yield
        finally:
            if other:
                self._swap()

    def _swap(self) -> None:
        for flat, mains in zip(self.flats, self._of_bucket, strict=True):
            if flat.buffered:
                flat.swap()
            for main in mains:
                main.swap(flat.grads)

    def finish(self) -> None:
        """Wait until the gradients that :meth:`runs` shows are sums over all replicas, and have their squares added."""
        raise NotImplementedError

    def updated(self, *, aside: bool = False, skipped: bool = False, ahead: bool = False) -> None:
        """The optimizer has updated this rank's part of the parameters, or ``skipped`` it, and the gradients have
        served: those set ``aside``, or all there are. ``ahead`` of others' part, to :meth:`settle` later."""
        for main in self._mains:
            main.served() if aside else main.begin()
        if not skipped:  # what passes under way compute with is not written to
            self.published()
        if not ahead:
            self.settle()

    def buckets(self) -> list[tuple[Flat, list[tuple[nn.Parameter, int, Callable[[Tensor], None]]]]]:
        """Of each bucket its memory, and of each parameter in it the first element and what takes in its gradients."""
        return [
            (
                flat,
                [
                    (main.held.parameter, slot.start, main.add)
                    for main, slot in zip(mains, flat.bucket.slots, strict=True)
                ],
            )
            for flat, mains in zip(self.flats, self._of_bucket, strict=True)
        ]

    @property
    def _turns(self) -> Sequence[int]:
        """For each bucket the turn in which it is updated."""
        return [0] * len(self.flats)

    def publish(self, turn: int) -> None:
        """The masters of a turn have new values: begin to give them to whoever computes with them."""

    def published(self, *, fresh: bool = False) -> None:
        """All masters have new values, those on shelves too if they are ``fresh``: have the model compute with them.
        After an update, that of the shelves has seen to it, unless they were updated with the rest."""
        for flat in self.flats:
            flat.publish(fresh=fresh)
        if self._visits is not None:
            self._visits.release()

    def settle(self) -> None:
        """Wait until this rank has the parameters that it keeps: those that have been published."""

    def release(self) -> None:
        """A pass without gradients is over, or a step was cut short."""
        if self._visits is not None:
            self._visits.release()

    # ---- what it holds

    def runs(self) -> list[Run]:
        """What the optimizer updates where it is: runs of parameters that it treats alike."""
        buckets = zip(self._turns, self.flats, self._of_bucket, strict=True)
        return [run for turn, flat, mains in buckets for run in runs_of(flat, mains, turn)]

    def shelves(self) -> list[AnyShelf]:
        """What it updates otherwise, in the order in which gradients become complete."""
        return [shelf for flat in self.flats if not flat.stowage.by_matrix for shelf in flat.stowage.shelves]

    def weights(self) -> Iterator[Fragment]:
        """What this rank holds of every weight, frozen ones too."""
        self.settle()
        for flat in self.flats:
            flat.adopt()
        for one in self.frozen:
            yield from one.fragments("weight", one.parameter.detach())
        for flat in (*self.flats, *self.frozen_flats):
            if flat.keep_params and not flat.mixed and not flat.stowage.shelves:
                for slot in flat.bucket.slots:
                    yield from slot.held.fragments("weight", slot.of(flat.params))
            else:
                yield from flat.fragments("weight", self._divide)

    def states(self) -> Iterator[Fragment]:
        """What this rank holds of every optimizer state."""
        for flat in self.flats:
            for name in flat.states:
                yield from flat.fragments(name, self._divide)

    def gradients(self) -> Iterator[Fragment]:
        """What this rank holds of every reduced gradient, between :meth:`finish` and the update."""
        for flat, mains in zip(self.flats, self._of_bucket, strict=True):
            if flat.buffered:
                yield from flat.fragments("gradient", self._divide)
            else:
                for main in mains:
                    yield from main.held.fragments("gradient", main.gradient)

    def check(self, *, under_way: bool = False) -> None:
        """Raise :class:`ConfigError` if a parameter no longer trains as it did when the layout was applied, or lies
        elsewhere. What somebody has written to parameters is what training goes on from; while steps are ``under_way``,
        which compute with what was there, it is an error."""
        for one in (*self.frozen, *(slot.held for flat in self.frozen_flats for slot in flat.bucket.slots)):
            if one.parameter.requires_grad:
                raise ConfigError(f"Engine: {one.name} was unfrozen after the engine was made; do it before")
        for flat in self.flats:
            flat.check_views()
            if under_way:
                flat.check_unwritten()
            else:
                flat.adopt()

    # ---- for subclasses

    def _send(self, number: int) -> None:
        """Begin to reduce bucket ``number``, whose gradients are complete."""
        raise NotImplementedError

    def _start_gather(self, whole: Tensor, own: Tensor, group: Group) -> Pending:
        """Begin to gather the parameters of a bucket."""
        return start_all_gather(whole, own, group, "parameters")

    def _start_cross(self, number: int) -> list[Pending]:
        """Begin to sum this rank's part of a bucket with those who hold the same part."""
        own = self.flats[number].own_grads
        return [start_all_reduce(own[part], group, "gradients") for part, group in self._crosses[number]]

    def _by_name(self, number: int) -> str:
        """Orders buckets alike on all stages that share some of them."""
        return self.flats[number].bucket.name

    def _add_squares(self, number: int) -> None:
        """A bucket's sums are there."""
        self.norm.add(self.flats[number], self._of_bucket[number])

    def make_ready(self, main: Main) -> None:
        """A gradient is about to enter: see that it may, and that its bucket has memory."""
        if main.bucket in self._sent:
            raise late(main)
        self._open(main.bucket)

    def _open(self, number: int) -> None:
        grads = self.flats[number].grads
        if not is_open(grads):
            open_(grads)

    def _fill_up(self, number: int) -> None:
        """The gradients of a bucket are complete."""
        self._open(number)
        for main in self._of_bucket[number]:
            main.fill_up()

    def _complete(self, number: int) -> None:
        """Nothing more will come for a bucket: send it."""
        for main in self._of_bucket[number]:
            if main.buffered and not main.settled:
                raise late(main)
            main.complete()
        self._fill_up(number)
        self._sent.add(number)
        self._send(number)
