"""An order in which the actions of all ranks can happen: each rank goes on until it waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shoal.pipeline.program import DROP, RECEIVE, SEND, Act, Op, Program, giver, named, placement

Awaited = Callable[[Act, int], tuple[int, Act] | None]
"""What an action of a rank waits for: a :func:`named` action of another rank, if anything."""

_SENDS, _DROPS = set(SEND.values()), set(DROP.values())
_OF_ACTIVATIONS = {Op.SEND_ACTIVATION, Op.DROP_ACTIVATION}


def in_turn(programs: Sequence[Program], awaited: Awaited) -> Iterator[tuple[int, Act]]:
    """The actions of all ranks and whose they are, each after those before it on its rank and what it waits for. Where
    ranks wait for each other, those actions and what comes after them are left out."""
    done: list[set[Act]] = [set() for _ in programs]
    reached = [0] * len(programs)
    waiting: dict[tuple[int, Act], list[int]] = {}
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        actions = programs[rank].actions
        while reached[rank] < len(actions):
            act = actions[reached[rank]]
            if (one := awaited(act, rank)) and one[1] not in done[one[0]]:
                waiting.setdefault(one, []).append(rank)
                break
            reached[rank] += 1
            yield rank, act
            done[rank].add(name := named(act))
            ready += waiting.pop((rank, name), ())


def awaited_by_whole(home: Sequence[int]) -> Awaited:
    """In programs that say what is sent and received: a pass waits for what it takes in, a drop for room on the other
    side.

    Sends wait for nothing, and neither do receives, which only make room. For an activation of unknown form they cannot
    even do that: it has room at the latest when its pass begins, which is what its drop waits for. The norm waits for
    all ranks, but all that they can wait for comes before it.
    """

    def awaited(act: Act, rank: int) -> tuple[int, Act] | None:
        if act.op in _DROPS:
            received = answer(act, rank)
            if received.op is Op.RECEIVE_ACTIVATION:
                return act.peer, Act(Op.FORWARD, received.stage, act.micro_batch)
            return act.peer, received
        source = giver(act, len(home))
        if source is None or (peer := home[source.stage]) == rank:
            return None
        return peer, Act(SEND[source.op], source.stage, source.micro_batch, rank)

    return awaited


def with_collectives(programs: Sequence[Program], awaited: Awaited) -> tuple[list[Program], Awaited]:
    """Programs of a stream whose norms wait for the reductions of all ranks, and whose updates for the norms of all.

    What all ranks do together is one more program, at the end of the list, that takes part in one thing after another.
    Not every schedule waits so for all of its ranks, but whoever cannot deadlock so, cannot with less to wait for.
    """
    home, together = placement(programs), len(programs)
    actions: list[Act] = []
    for number in (act.micro_batch for act in programs[0].actions if act.op is Op.UPDATE):
        actions += (Act(Op.REDUCE, stage, number, rank) for stage, rank in enumerate(home))
        actions += (Act(Op.NORM, -1, number, rank) for rank in range(together))
        actions.append(Act(Op.UPDATE, -1, number))

    def awaited_too(act: Act, rank: int) -> tuple[int, Act] | None:
        if rank == together:
            return None if act.op is Op.UPDATE else (act.peer, act._replace(peer=-1))
        if act.op is Op.NORM:
            return together, Act(Op.REDUCE, len(home) - 1, act.micro_batch, home[-1])
        return (together, act) if act.op is Op.UPDATE else awaited(act, rank)

    return [*programs, Program((), 0, tuple(actions))], awaited_too


def awaited_by_passes(home: Sequence[int]) -> Awaited:
    """In programs of passes alone: a pass waits for the one whose result it takes in."""

    def awaited(act: Act, rank: int) -> tuple[int, Act] | None:
        source = giver(act, len(home))
        return (peer, source) if source and (peer := home[source.stage]) != rank else None

    return awaited


def answer(act: Act, rank: int) -> Act:
    """What the other rank does to receive what ``rank`` sends or drops."""
    if act.op in _OF_ACTIVATIONS:
        return Act(RECEIVE[Op.FORWARD], act.stage + 1, act.micro_batch, rank)
    return Act(RECEIVE[Op.BACKWARD], act.stage - 1, act.micro_batch, rank)


def is_whole(programs: Sequence[Program]) -> bool:
    """Whether the programs say what is sent and received, or are of passes alone."""
    return any(act.op in _SENDS for program in programs for act in program.actions)
