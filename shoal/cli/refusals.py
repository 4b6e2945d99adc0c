"""What a command's options refuse, told as everything else is: with the value, and what would be right."""

from __future__ import annotations

from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from shoal.errors import ConfigError, setting

_LEGAL = {"int_parsing": "use a whole number such as 4", "float_parsing": "use a number such as 0.5"}


class NamesValues(TyperGroup):
    """Commands whose options say which value it is that they cannot have; Typer's box says only why."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            raise _told(error, error.__cause__) from None


def _told(error: typer.BadParameter, why: ValidationError) -> ConfigError:
    fault, param = why.errors()[0], error.param
    assert param is not None
    least = fault.get("ctx", {}).get("ge")
    helps = f"see {error.ctx.command_path} --help" if error.ctx is not None else "see --help"
    legal = _LEGAL.get(fault["type"], helps) if least is None else f"use {least} or more"
    return ConfigError(setting(param.opts[0], fault["input"], fault["msg"][0].lower() + fault["msg"][1:], legal))
