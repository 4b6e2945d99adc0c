"""What a command asks of a run that its file does not say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """The options of a run."""

    fresh: bool = False
    """Whether it starts at step 0, and what an earlier run left is moved aside."""
    trace: bool = False
    """Whether what happens in some steps is written down (:mod:`shoal.train.tracing`)."""
    memory: bool = False
    """Whether what one step holds is (:mod:`shoal.train.metering`)."""

    @property
    def watching(self) -> str:
        """The option that needs a step to look at; nothing where there is none."""
        return "--trace" if self.trace else "--memory" if self.memory else ""


NOTHING = Asked()
