"""What memory is for, as a meter counts it and a report shows it."""

from __future__ import annotations

ACTIVATIONS, WORKSPACE, OUTSIDE = "activations", "workspace", "outside"
"""The categories of storages that nobody labelled: made in a phase named ``forward``, made in any other phase, and
made where the meter could not see it but used by an operation that it did see (before it was entered, or through
another library's memory, as ``torch.from_numpy`` and memory-mapped files do)."""

PARAMETERS, GRADIENTS, STATES = "parameters", "gradients", "optimizer states"
LOGITS, COMMUNICATION = "logits", "communication"
"""What Shoal marks memory with, beside activations. Masters are optimizer states; what is on its way between ranks, or
gathered from them for a while, is communication."""

HOST = "host"
"""The category of what has been moved off the device. Where there is no GPU, the device is an account in the same
memory."""

BUFFERS = "buffers"
"""What of the host's memory is for nothing else than for things to pass through."""
