"""What every rank must do, or none: all ranks go on together, or all raise the same error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.comm.collectives import all_gather_bytes
from shoal.comm.world import World
from shoal.errors import CheckpointError

T = TypeVar("T")


def together(
    work: Callable[[], T], world: World, doing: str, share: Callable[[T], Any] = lambda result: None
) -> tuple[T, list[Any]]:
    """Do ``work`` on every rank of ``world``; returns this rank's result and what each rank shares of its own.

    ``share`` picks the part of the result, a JSON value, that all ranks see. If any rank raised, all of them raise
    one :class:`CheckpointError`, which names the first such rank and its reason; ``doing`` says what failed. It is
    also the barrier: nobody returns before everybody has finished.
    """
    cause: Exception | None = None
    result: T
    try:
        result = work()
        reply = json.dumps({"shared": share(result)})
    except Exception as error:  # Whatever it is, the other ranks wait to hear of it.
        cause = error
        reason = str(error) if isinstance(error, CheckpointError) else f"{doing}: {type(error).__name__}: {error}"
        reply = json.dumps({"error": reason})
    replies = [json.loads(data) for data in all_gather_bytes(reply.encode(), world.everyone, world.device)]
    failed = {rank: reply["error"] for rank, reply in enumerate(replies) if "error" in reply}
    if failed:
        raise CheckpointError(_summary(failed, world.size)) from cause
    return result, [reply["shared"] for reply in replies]


def _summary(failed: dict[int, str], size: int) -> str:
    rank, reason = next(iter(failed.items()))
    if len(failed) == size and set(failed.values()) == {reason}:
        return reason
    others = f" ({len(failed) - 1} more of {size} ranks failed)" if len(failed) > 1 else ""
    return f"rank {rank}: {reason}{others}"
