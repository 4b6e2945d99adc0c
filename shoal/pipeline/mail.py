"""Tensors on their way between stages on different ranks.

Who receives an activation cannot know its form, so the first of each kind comes after a header, and both sides remember
it. Of one kind are the activations at a boundary of all micro-batches whose tensors have the same shapes. A gradient
has the form of the activation that it answers.

From each rank, activations and headers are received in the order in which they are sent. So there is no room for an
activation before the form of every earlier one from the same rank is known: at the latest when a pass needs it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.collectives import Pending
from shoal.comm.point_to_point import MESSAGE_TAGS, start_receive, start_send
from shoal.errors import LayoutError, setting
from shoal.meter import mark
from shoal.pipeline.lines import Lines
from shoal.pipeline.program import DROP, Act, Op, named
from shoal.purposes import ACTIVATIONS, COMMUNICATION

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What may cross a boundary: what can have a gradient."""
MAX_DIMS = 8

Kind = tuple[object, ...]
_Place = tuple[int, int]  # stage, micro-batch
_MAX_STAGES = 1 << 12
_NUMBERS = MESSAGE_TAGS.stop // (2 * _MAX_STAGES)
"""A stream may have more micro-batches than that; those under way at once have fewer."""


class Form(NamedTuple):
    """What a tensor at a boundary is like; ``needs_grad`` says whether its gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {list(self.shape)}" + ("" if self.needs_grad else " without gradient")

    def header(self) -> list[int]:
        """The form as numbers, as many for every form."""
        padding = [0] * (MAX_DIMS - len(self.shape))
        return [DTYPES.index(self.dtype), self.needs_grad, len(self.shape), *self.shape, *padding]

    @classmethod
    def read(cls, header: list[int]) -> Form:
        dtype, needs_grad, dims, *shape = header
        return cls(tuple(shape[:dims]), DTYPES[dtype], bool(needs_grad))


_HEADER = Form((3 + MAX_DIMS,), torch.int64, False)


def kind_of(batch: Mapping[str, Tensor], train: bool) -> Kind:
    """What a micro-batch has in common with all whose activations have the form of its own."""
    return (train, *sorted((name, tuple(tensor.shape)) for name, tensor in batch.items()))


@dataclass
class _Message:
    act: Act
    tensor: Tensor
    pending: Pending


class Mail:
    """What one rank has sent and awaits in one run of a program.

    ``forms`` are those known of each (receiving stage, kind); they outlive the run.
    """

    def __init__(self, lines: Lines, forms: dict[tuple[int, Kind], Form], device: torch.device) -> None:
        self._lines, self._forms, self._device = lines, forms, device
        self._roomless: dict[int, deque[tuple[Act, Kind]]] = defaultdict(deque)
        """By the rank that they come from: the activations to receive for which there is no room yet, in order."""
        self._headers: dict[int, _Message] = {}
        """By rank, too: the header of the first of those."""
        self._sender: dict[_Place, int] = {}
        self._expected: dict[tuple[Op, int, int], _Message] = {}
        self._sent: dict[Act, list[_Message]] = defaultdict(list)

    def form(self, output: object, maker: str) -> Form:
        """What an output is like. Raises :class:`LayoutError` where it cannot be sent; ``maker`` says whose it is."""
        found = f"a {type(output).__name__}"
        if isinstance(output, Tensor):
            form = Form(tuple(output.shape), output.dtype, output.requires_grad)
            if output.dtype in DTYPES and output.ndim <= MAX_DIMS:
                return form
            found = str(form)
        problem = f"{maker} returns {found}; stages hand over one floating-point tensor of at most {MAX_DIMS} dims"
        raise LayoutError(setting("layout.pp", self._size, problem, "use pp=1, or layers= to cut elsewhere"))

    def send_activation(self, act: Act, output: Tensor, form: Form, kind: Kind) -> None:
        """Raises :class:`LayoutError` where another micro-batch of the kind had another form."""
        known = self._forms.setdefault((act.stage + 1, kind), form)
        if known is form:
            self._send(act, torch.tensor(form.header(), device=self._device), header=True)
        elif known != form:
            problem = f"stage {act.stage} made {known} of one micro-batch and {form} of another of the same shapes"
            raise LayoutError(setting("layout.pp", self._size, problem, "use pp=1"))
        self._send(act, output)

    def receive_activation(self, act: Act, kind: Kind) -> None:
        """Make room for the input of a stage as soon as it is its turn and its form is known."""
        self._sender[act.stage, act.micro_batch] = act.peer
        self._roomless[act.peer].append((act, kind))
        self._make_room(act.peer)

    def activation(self, act: Act, kind: Kind) -> tuple[Tensor, Form]:
        """The input of a stage, which may not be there before :meth:`await_activation`. Waits for its form alone."""
        peer = self._sender.pop((act.stage, act.micro_batch))
        while (place := _place(act)) not in self._expected:
            (first, of_first), header = self._roomless[peer][0], self._headers.pop(peer)
            self._wait(header)
            self._forms[first.stage, of_first] = Form.read(header.tensor.tolist())
            self._make_room(peer)
        return self._expected[place].tensor, self._forms[act.stage, kind]

    def await_activation(self, act: Act) -> None:
        """The input of a stage is there from now on."""
        message = self._expected.pop(_place(act))
        self._wait(message)
        mark(ACTIVATIONS, message.tensor)

    def _make_room(self, peer: int) -> None:
        """For all activations from a rank up to one of unknown form, and for the header of that one."""
        while roomless := self._roomless[peer]:
            act, kind = roomless[0]
            if (form := self._forms.get((act.stage, kind))) is None:
                if peer not in self._headers:
                    self._headers[peer] = self._receive(act, _HEADER, header=True)
                return
            self._expected[Op.FORWARD, act.stage, act.micro_batch] = self._receive(act, form)
            roomless.popleft()

    def send_gradient(self, act: Act, gradient: Tensor) -> None:
        self._send(act, gradient)

    def receive_gradient(self, act: Act, form: Form) -> None:
        """Make room for the gradient of an output of ``form``."""
        self._expected[Op.BACKWARD, act.stage, act.micro_batch] = self._receive(act, form)

    def take_gradient(self, act: Act) -> Tensor:
        """The gradient of a stage's output, once it has arrived."""
        message = self._expected.pop(_place(act))
        self._wait(message)
        return message.tensor

    def drop(self, act: Act) -> None:
        """Let go of what was sent, once it has been received; of nothing, where nothing had to be sent."""
        for message in self._sent.pop(act, ()):
            self._wait(message)

    @property
    def _size(self) -> int:
        return self._lines.ranks.size

    def _send(self, act: Act, tensor: Tensor, *, header: bool = False) -> None:
        tensor, tag = tensor.contiguous(), _tag(act.stage, act.micro_batch, header)
        dropped = Act(DROP[act.op], *act[1:])
        mark(COMMUNICATION, tensor)
        pending = start_send(tensor, self._lines.of(act), act.peer, tag)
        self._sent[dropped].append(_Message(dropped, tensor, pending))

    def _receive(self, act: Act, form: Form, *, header: bool = False) -> _Message:
        sender = act.stage + (1 if act.op is Op.RECEIVE_GRADIENT else -1)
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self._device)
        mark(COMMUNICATION, tensor)
        tag = _tag(sender, act.micro_batch, header)
        purpose = "boundary header" if header else "boundary"
        return _Message(act, tensor, start_receive(tensor, self._lines.of(act), act.peer, tag, purpose))

    def _wait(self, message: _Message) -> None:
        try:
            message.pending.wait()
        except RuntimeError as error:
            peer = self._lines.ranks.ranks[message.act.peer]
            error.add_note(f"nothing from rank {peer} while {message.act.in_words()}")
            raise


def _place(act: Act) -> tuple[Op, int, int]:
    """Under which a pass finds what it takes in."""
    return named(act).op, act.stage, act.micro_batch


def _tag(sender: int, micro_batch: int, header: bool) -> int:
    """A number for each message of a step over one line, from the stage that sends it."""
    assert sender < _MAX_STAGES
    return (micro_batch % _NUMBERS * _MAX_STAGES + sender) * 2 + header
