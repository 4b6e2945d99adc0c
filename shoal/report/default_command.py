"""A group of commands, one of which is meant where none is named."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class MakeByDefault(TyperGroup):
    """``shoal data TEXT OUT`` means ``shoal data make TEXT OUT``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["make", *args]
        return super().parse_args(ctx, args)
