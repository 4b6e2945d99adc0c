"""The loop: resume, step, evaluate, save, until the last step. One rank's part of a run."""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shoal import __version__
from shoal.comm.collectives import all_reduce, barrier
from shoal.comm.world import World
from shoal.config import Config, toml
from shoal.data.batches import Batch, Batches, batch_hash
from shoal.data.store import kept_tokenizer
from shoal.data.tokenize import load_tokenizer
from shoal.engine import Engine
from shoal.errors import Diverged, Stopped
from shoal.layout import Layout
from shoal.train.asked import NOTHING, Asked
from shoal.train.budget import within_budget
from shoal.train.folder import COMPANIONS, TOKENIZER, move_aside, run_folder
from shoal.train.metering import Metering
from shoal.train.metrics import Sink, open_sinks
from shoal.train.resume import advice, find_newest, last_step, remember
from shoal.train.samples import open_splits, parts_of
from shoal.train.setup import Source, batch_size, make_engine, make_model
from shoal.train.speak import Prompt, pieces
from shoal.train.start import keep_companions
from shoal.train.tracing import Tracing

MANY_DROPPED = 0.5
"""The share of tokens dropped by experts from which on that is told."""


def train(
    world: World,
    config: Config,
    layout: Layout,
    watch: Callable[[], Sequence[Sink]],
    asked: Asked = NOTHING,
) -> dict[str, Any]:
    """Train from the newest checkpoint of the run, or from the start, to the last step.

    ``layout`` fits ``world`` (see :func:`~shoal.train.setup.fit`). ``watch()`` makes further sinks, on the first rank.
    Returns the last step and the validation loss there (None without a validation split).
    """
    return _Run(world, config, layout, watch, asked).train()


class _Run:
    """What the loop holds."""

    def __init__(
        self,
        world: World,
        config: Config,
        layout: Layout,
        watch: Callable[[], Sequence[Sink]],
        asked: Asked,
    ) -> None:
        self.world, self.config = world, config
        self.folder = run_folder(config)
        self.source, self.validation = open_splits(config)
        self.size = batch_size(config)
        layout, self.peak = within_budget(config, layout, world, self.source)
        self.metering = Metering(self.folder) if asked.memory else None
        with self.metering.building() if self.metering is not None else nullcontext():
            self.engine: Engine = make_engine(config, layout, world)
        self.engine.overlap = True  # nobody here reads parameters but through it
        self.steps = last_step(config)
        self.memory = remember(config, self.source)
        self.sinks: list[Sink] = []
        self.warned = False
        """Whether somebody has been told that experts drop most of their tokens."""
        self.hashes: dict[int, str] = {}
        self.seconds: dict[int, float] = {}
        """Of steps that have not finished: the hash of their samples, and what they took before the next began."""
        continues = self._resume(fresh=asked.fresh)
        self.tracing = Tracing(self.engine, self.folder, self.steps - self.engine.steps_done) if asked.trace else None
        if self.metering is not None:
            self.metering.begin(self.engine, self.steps - self.engine.steps_done)
        self.aside: Path | None = None
        """Where an earlier run went."""
        if asked.fresh:
            barrier(world.everyone)  # what any rank refuses, it has refused
        if world.rank == 0:
            if asked.fresh:
                self.aside = move_aside(config)
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "run.toml").write_text(toml(config), encoding="utf-8")
            _keep_tokenizer(self.source, self.folder)
            if not continues:
                keep_companions(config, self.folder)
            self.sinks = [*open_sinks(config, self.folder), *watch()]

    def train(self) -> dict[str, Any]:
        try:
            self._tell("start", **self._start_values())
            loss = self._steps()
            self._drain()
            self._sample()
            if self.tracing is not None and (traced := self.tracing.write()) is not None:
                self._tell("trace", **traced)
            if self.metering is not None and (held := self.metering.write()) is not None:
                self._tell("memory", **held)
            self._tell("end", step=self.engine.steps_done, validation_loss=loss)
            return {"step": self.engine.steps_done, "validation_loss": loss}
        except Diverged as error:
            self._tell_finished()
            self._skipped(error.step - 1, error.micro_batches)
            raise
        finally:
            for sink in self.sinks:
                sink.close()

    def _steps(self) -> float | None:
        """All steps that are left; returns the validation loss after the last."""
        config, engine, loss = self.config, self.engine, None
        saved = engine.steps_done
        for step in range(engine.steps_done, self.steps):
            started = time.perf_counter()
            batch = self.source.batch(step, self.engine.mesh.coords["dp"], engine.layout.dp)
            traced = self.tracing.around(step) if self.tracing is not None else nullcontext()
            measured = self.metering.around(step) if self.metering is not None else nullcontext()
            with traced, measured:
                engine.step(batch)
            self.seconds[step] = time.perf_counter() - started
            if config.log.hashes:
                self.hashes[step] = self._global_hash(batch)
            self._tell_finished()
            if _due(config.evaluation.every, step + 1, self.steps):
                loss = self._evaluate()
            if _due(config.checkpoint.every, step + 1, self.steps):
                self._save()
                saved = step + 1
        if saved == self.steps and self.validation is not None and loss is None:
            loss = self._evaluate()  # the run was complete already
        return loss

    def _tell_finished(self) -> None:
        """Tell of the steps that have finished."""
        for result in self.engine.finished():
            before, samples = self.size.at(result.step - 1)
            tokens = samples * self.config.data.seq_len
            values: dict[str, Any] = {
                "step": result.step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "tokens": (before + samples) * self.config.data.seq_len,
                "tokens_per_s": tokens / self.seconds.pop(result.step - 1),
                "memory_gib": _memory_gib(self.world.device),
            }
            if (found := self.hashes.pop(result.step - 1, None)) is not None:
                values["hash"] = found
            if (experts := result.experts) is not None:
                values |= {"gate_loss": experts.loss, "largest_load": experts.largest, "dropped": experts.dropped}
                values["expert_tokens"] = dict(experts.tokens)
            self._tell("step", **values)
            if experts is not None and experts.dropped > MANY_DROPPED and not self.warned:
                self.warned = True
                self._tell("dropped", step=result.step, share=experts.dropped, capacity=self.config.model.capacity)
            if result.skipped:
                self._skipped(result.step - 1, result.micro_batches)

    def _drain(self) -> None:
        """End the steps that are under way, and tell of them."""
        self.engine.drain()
        self._tell_finished()

    def _skipped(self, step: int, micro_batches: Sequence[int]) -> None:
        """Tell which samples a step (counted from 0) had that updated nothing: all of them, or where micro-batches are
        updates of their own, those of ``micro_batches``, of which every replica has an equal part."""
        first, count = self.size.at(step)
        samples = list(range(first, first + count))
        if micro_batches:
            size = count // (self.engine.layout.dp * self.engine.layout.mb)
            parts = [samples[at : at + size] for at in range(0, count, size)]
            samples = [
                one for at, part in enumerate(parts) if at % self.engine.layout.mb in micro_batches for one in part
            ]
        self._tell("skipped", step=step + 1, so_far=self.engine.skipped, samples=samples)

    def _evaluate(self) -> float | None:
        """Mean loss over the validation split, or its first batches."""
        if self.validation is None:
            return None
        self._drain()
        count = self.config.evaluation.batches
        if isinstance(self.validation, Batches):
            count = min(count, self.validation.n_batches)
        total = weight = 0.0
        for number in range(count):
            batch = self.validation.batch(number, self.engine.mesh.coords["dp"], self.engine.layout.dp)
            summed, counted = self.engine.evaluate(batch)
            total, weight = total + summed, weight + counted
        loss = total / max(weight, 1.0)
        self._tell("evaluation", step=self.engine.steps_done, loss=loss, batches=count)
        return loss

    def _save(self) -> None:
        self._drain()
        path = self.engine.save(self.folder, self.memory, keep=self.config.checkpoint.keep)
        self._tell("checkpoint", step=self.engine.steps_done, path=str(path))

    def _resume(self, *, fresh: bool) -> bool:
        """Continue from the newest checkpoint of the run's folder, if it is one of the same run and this one does not
        start ``fresh``, or begin with the weights that the run file names; returns whether it continues."""
        found = None if fresh else find_newest(self.config, self.source)
        if found is not None:
            with advice(found):
                self.engine.load(found)
        elif self.config.checkpoint.start is not None:
            self.engine.load(self.config.checkpoint.start, states=False)
        return found is not None

    def _sample(self) -> None:
        """Let the trained model speak, where the run file gives it a beginning."""
        text, path = self.config.run.sample, self.folder / TOKENIZER
        if not text:
            return
        # The first rank alone needs to see the tokenizer's file.
        tokenizer = load_tokenizer(path) if self.world.rank == 0 and path.exists() else None
        asked = None if tokenizer is None else asdict(Prompt.of(text, tokenizer, self.folder / COMPANIONS))
        heard = json.loads(self.world.hear_first(json.dumps(asked)))
        if heard is None or not heard["ids"]:
            return
        prompt, shape, count = Prompt(**heard), self.config.model, self.config.run.sample_tokens
        if shape.positions == "learned":  # the last token that is drawn needs no position
            count = min(count, shape.max_positions - len(prompt.ids) + 1)
        said = list(prompt.continued(self.engine.decoding(), tokens=count))
        if tokenizer is not None:
            self._tell("sample", prompt=text, text="".join(pieces(iter(said), tokenizer)))

    def _start_values(self) -> dict[str, Any]:
        return {
            "layout": str(self.engine.layout),
            "ranks": self.world.size,
            "parameters": sum(p.numel() for p in make_model(self.config, self.engine.layout).parameters()),
            "peak_bytes": self.peak,
            "step": self.engine.steps_done,
            "steps": self.steps,
            "folder": str(self.folder),
            "aside": None if self.aside is None else str(self.aside),
            "data": [part.as_json() for part in parts_of(self.source)],
            "shoal": __version__,
            "torch": torch.__version__,
        }

    def _global_hash(self, batch: Batch) -> str:
        """One hash of the whole step's samples, whichever ranks read them."""
        total = torch.tensor(batch_hash(batch), dtype=torch.int64, device=self.world.device)
        all_reduce(total, self.engine.mesh.over("dp"), "hash")
        return f"{int(total.item()) & (1 << 64) - 1:016x}"

    def _tell(self, event: str, **values: Any) -> None:
        try:
            for sink in self.sinks:
                sink.record(event, values)
        except BrokenPipeError:
            raise Stopped("standard output was closed, so nobody could see how the run goes on") from None


def _keep_tokenizer(source: Source, folder: Path) -> None:
    """A copy beside the checkpoints, so that text can be generated from the folder alone."""
    if isinstance(source, Batches) and (kept := kept_tokenizer(source.samples.stores)) is not None:
        with suppress(shutil.SameFileError):
            shutil.copyfile(kept, folder / TOKENIZER)


def _due(every: int, step: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _memory_gib(device: torch.device) -> float:
    """Peak memory of this process: on its GPU, or resident where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
