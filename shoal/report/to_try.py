"""What to try next, as every command that ends well says it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.markup import escape


def to_try(steps: Iterable[tuple[str, str]]) -> str:
    """The lines for (what for, command) of each step, with markup; nothing where there is none."""
    if not (listed := list(steps)):
        return ""
    width = max(len(what) for what, _ in listed) + 2
    lines = (f"  {escape(f'{what:<{width}}')}[bold]{escape(command)}[/]" for what, command in listed)
    return "\n".join(["\nWhat to try next:", *lines])
