"""Tensors on their way between stages on different ranks.

Who receives an activation cannot know its form, so the first of each kind comes with a header, and both sides remember
it. Of one kind are the activations at a boundary of all micro-batches whose tensors have the same shapes. A gradient
has the form of the activation that it answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.collectives import Pending
from shoal.comm.point_to_point import start_receive, start_send
from shoal.comm.world import Group
from shoal.errors import LayoutError, setting
from shoal.pipeline.program import DROP, Act, Op

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What may cross a boundary: what can have a gradient."""
MAX_DIMS = 8

Kind = tuple[object, ...]
_MAX_STAGES, _FIRST_TAG = 1 << 12, 16  # smaller tags are those of shoal.comm.collectives
_ACTIVATION, _GRADIENT, _HEADER = range(3)


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

    def __init__(self, group: Group, forms: dict[tuple[int, Kind], Form], device: torch.device) -> None:
        self._group, self._forms, self._device = group, forms, device
        self._headers: dict[tuple[int, Kind], _Message] = {}
        self._formless: dict[tuple[int, int], Act] = {}
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
        raise LayoutError(setting("layout.pp", self._group.size, problem, "use pp=1, or layers= to cut elsewhere"))

    def send_activation(self, act: Act, output: Tensor, form: Form, kind: Kind) -> None:
        """Raises :class:`LayoutError` where another micro-batch of the kind had another form."""
        known = self._forms.setdefault((act.stage + 1, kind), form)
        if known is form:
            self._send(act, torch.tensor(form.header(), device=self._device), _HEADER)
        elif known != form:
            problem = f"stage {act.stage} made {known} of one micro-batch and {form} of another of the same shapes"
            raise LayoutError(setting("layout.pp", self._group.size, problem, "use pp=1"))
        self._send(act, output, _ACTIVATION)

    def receive_activation(self, act: Act, kind: Kind) -> None:
        """Make room for the input of a stage; for its header, where its form is not known."""
        key, at = (act.stage, kind), (act.stage, act.micro_batch)
        if key in self._forms:
            self._expected[Op.FORWARD, *at] = self._receive(act, self._forms[key], _ACTIVATION)
            return
        self._formless[at] = act
        if key not in self._headers:
            self._headers[key] = self._receive(act, Form((3 + MAX_DIMS,), torch.int64, False), _HEADER)

    def take_activation(self, act: Act, kind: Kind) -> tuple[Tensor, Form]:
        """The input of a stage, once it has arrived."""
        key, at = (act.stage, kind), (act.stage, act.micro_batch)
        if received := self._formless.pop(at, None):
            if header := self._headers.pop(key, None):
                self._wait(header)
                self._forms[key] = Form.read(header.tensor.tolist())
            self.receive_activation(received, kind)
        return self._take(act), self._forms[key]

    def send_gradient(self, act: Act, gradient: Tensor) -> None:
        self._send(act, gradient, _GRADIENT)

    def receive_gradient(self, act: Act, form: Form) -> None:
        """Make room for the gradient of an output of ``form``."""
        self._expected[Op.BACKWARD, act.stage, act.micro_batch] = self._receive(act, form, _GRADIENT)

    def take_gradient(self, act: Act) -> Tensor:
        """The gradient of a stage's output, once it has arrived."""
        return self._take(act)

    def drop(self, act: Act) -> None:
        """Let go of what was sent, once it has been received; of nothing, where nothing had to be sent."""
        for message in self._sent.pop(act, ()):
            self._wait(message)

    def _send(self, act: Act, tensor: Tensor, what: int) -> None:
        tensor = tensor.contiguous()
        tag = _tag(act.stage, act.micro_batch, what)
        dropped = act._replace(op=DROP[act.op])
        self._sent[dropped].append(_Message(dropped, tensor, start_send(tensor, self._group, act.peer, tag)))

    def _receive(self, act: Act, form: Form, what: int) -> _Message:
        sender = act.stage + (1 if act.op is Op.RECEIVE_GRADIENT else -1)
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self._device)
        purpose = "boundary header" if what == _HEADER else "boundary"
        tag = _tag(sender, act.micro_batch, what)
        return _Message(act, tensor, start_receive(tensor, self._group, act.peer, tag, purpose))

    def _take(self, act: Act) -> Tensor:
        message = self._expected.pop((act.op, act.stage, act.micro_batch))
        self._wait(message)
        return message.tensor

    def _wait(self, message: _Message) -> None:
        try:
            message.pending.wait()
        except RuntimeError as error:
            error.add_note(f"nothing from rank {self._group.ranks[message.act.peer]} while {message.act.in_words()}")
            raise


def _tag(sender: int, micro_batch: int, what: int) -> int:
    """A number for each message of a step, from the stage that sends it."""
    assert sender < _MAX_STAGES
    return _FIRST_TAG + (micro_batch * _MAX_STAGES + sender) * 3 + what
