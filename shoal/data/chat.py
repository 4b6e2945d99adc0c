"""Conversations as pieces of text and control tokens, by templates that are data and not programs.

A template that is a program (the Jinja of a tokenizer_config.json) is not run: it makes one string, which does not say
which part the assistant wrote, and in which the text of a message can pass for a control token. Here control tokens go
in by name, and the text of a message is only ever text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.data.pieces import Piece
from shoal.data.records import Record, string
from shoal.errors import DataError, nearest, setting

ROLES = ("system", "user", "assistant")
MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"


@dataclass(frozen=True)
class Template:
    """How a conversation is written.

    ``begin``    the token before the first message, if any
    ``header``   what opens a message: texts, in which ``{role}`` stands for the role, each with the token behind it
    ``end``      the token that ends a message, and with the last one the conversation
    ``between``  text between two messages
    ``trims``    whether white space around the text of a message is left out
    """

    name: str
    header: tuple[tuple[str, str | None], ...]
    end: str
    between: str = ""
    begin: str | None = None
    trims: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        """The control tokens, in the order in which they appear."""
        found = (self.begin, *(token for _, token in self.header), self.end)
        return tuple(token for token in found if token is not None)


CHATML = Template("chatml", (("", "<|im_start|>"), ("{role}\n", None)), "<|im_end|>", between="\n")
LLAMA_3 = Template(
    "llama-3",
    (("", "<|start_header_id|>"), ("{role}", "<|end_header_id|>"), ("\n\n", None)),
    "<|eot_id|>",
    begin="<|begin_of_text|>",
    trims=True,
)
NAMES = ("chatml", "llama-3", "plain")


def plain(end_of_document: str) -> Template:
    """``user:`` and ``assistant:`` on lines of their own, for a tokenizer that knows no token but the one that ends a
    document."""
    return Template("plain", (("{role}:\n", None),), end_of_document, between="\n\n")


def find_template(name: str | None, has: Callable[[str], bool], end_of_document: str) -> Template:
    """The template called ``name``; without a name, the first of chatml and llama-3 whose tokens ``has`` knows, or
    the plain one. Raises DataError for another name, and for a token that is missing."""
    known = {"chatml": CHATML, "llama-3": LLAMA_3, "plain": plain(end_of_document)}
    if name is None:
        return next((one for one in known.values() if all(map(has, one.tokens))), known["plain"])
    if name not in known:
        legal = f"use one of {', '.join(known)}"
        raise DataError(setting("--template", name, f"no such template{nearest(name, known)}", legal))
    if missing := [token for token in known[name].tokens if not has(token)]:
        fitting = [one.name for one in known.values() if all(map(has, one.tokens))]
        legal = f"use {' or '.join(fitting)}" if fitting else "add them to its tokenizer.json"
        raise DataError(setting("--template", name, f"the tokenizer has no {', '.join(missing)}", legal))
    return known[name]


def conversation(record: Record, template: Template, read: int) -> Iterator[Piece]:
    """The pieces of the conversation in ``record["messages"]``: what the assistant says counts, with the token that
    ends it.

    Texts between control tokens are one piece, but for what the assistant says, which is a piece of its own: so a model
    reads in training the tokens that it reads when it is asked, up to the header that ends the question.

    Raises DataError, naming record and message, for what is no message.
    """
    turns = list(_turns(record))
    if template.begin is not None:
        yield Piece("", False, read, template.begin, counts=False)
    pending = ""
    for number, (role, text) in enumerate(turns, start=1):
        last, counts = number == len(turns), role == "assistant"
        for words, token in template.header:
            pending += words.format(role=role)
            if token is not None:
                yield Piece(pending, False, read, token, counts=False)
                pending = ""
        text = text.strip() if template.trims else text
        if counts and pending:
            yield Piece(pending, False, read, counts=False)
        yield Piece(text if counts else pending + text, last, read, template.end, counts)
        pending = template.between


def completion(record: Record, end: str, read: int) -> Iterator[Piece]:
    """The pieces of ``record["prompt"]`` and ``record["completion"]``, which counts, with the token ``end``."""
    yield Piece(record.text(PROMPT), False, read, counts=False)
    yield Piece(record.text(COMPLETION), True, read, end)


def _turns(record: Record) -> Iterator[tuple[str, str]]:
    """(role, text) of each message."""
    if MESSAGES not in record.values:
        raise DataError(f"{record.where}: no field '{MESSAGES}'; there is {', '.join(record.values) or 'none'}")
    messages = record.values[MESSAGES]
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{record.where}: '{MESSAGES}' must be a list of at least one message")
    for number, message in enumerate(messages, start=1):
        yield _turn(message, f"{record.where}, message {number}")


def _turn(message: Any, where: str) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise DataError(f'{where}: {type(message).__name__} instead of {{"role": ..., "content": ...}}')
    role, text = string(message, "role", where), string(message, "content", where)
    if role not in ROLES:
        raise DataError(f"{where}: role '{role}' is not known{nearest(role, ROLES)}; use one of {', '.join(ROLES)}")
    return role, text
