"""What a person sees of a run: what it will do, a line a step, how it ended and what to do next."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape

from shoal.config import Config
from shoal.layout import Layout
from shoal.report.to_try import to_try
from shoal.sizes import size_text

Values = Mapping[str, Any]


class PipeConsole(Console):
    """A console whose reader may leave: printing then raises ``BrokenPipeError``, where rich would exit in silence."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


class ConsoleSink:
    """Lines for people. Raises ``BrokenPipeError`` when nobody reads them any more."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._console = PipeConsole(highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        self._first = self._last = 0
        self._layout = ""
        self._written: list[str] = []
        """Of "trace" and "memory" those that there is now something to report of."""

    def record(self, event: str, values: Values) -> None:
        match event:
            case "start":
                self._start(values)
            case "step":
                self._step(values)
            case "skipped":
                self._print(
                    f"  [bold yellow]step {values['step']} updated nothing[/]: a gradient was not finite on some rank "
                    f"({values['so_far']} steps so far); metrics.jsonl names its samples"
                )
            case "dropped":
                self._print(
                    f"  [bold yellow]experts dropped {values['share']:.0%} of their tokens[/] in step "
                    f"{values['step']}: model.capacity = {values['capacity']} leaves no room for them; "
                    "use 1.25 or more, or leave it out"
                )
            case "evaluation":
                batches = f"{values['batches']} batch" + ("es" if values["batches"] != 1 else "")
                self._print(f"  [bold]validation loss {values['loss']:.4f}[/] at step {values['step']}, over {batches}")
            case "checkpoint":
                self._print(f"  [dim]saved {escape(values['path'])}[/]")
            case "sample":
                self._print("\n[bold]The model continues:[/]")
                self._print(f"[cyan]{escape(values['prompt'])}[/]{escape(values['text'])}\n")
            case "trace":
                self._written.append(event)
                self._trace(values)
            case "memory":
                self._written.append(event)
                self._memory(values)
            case "end":
                self._end(values)

    def close(self) -> None:
        pass

    def _start(self, values: Values) -> None:
        run = self._config.run
        ranks = f"{values['ranks']} process" + ("es" if values["ranks"] > 1 else "")
        data = self._config.data
        self._first, self._last, self._layout = values["step"], values["steps"], values["layout"]
        if values["aside"] is not None:
            self._print(f"the earlier run is now {escape(values['aside'])}")
        self._print(
            f"[bold]{run.name}[/]: {values['parameters']:,} parameters, layout [bold]{values['layout']}[/] on {ranks}; "
            f"{self._last:,} steps of {data.batch} × {data.seq_len} tokens; "
            f"everything goes to {escape(values['folder'])}/"
        )
        if (peak := values["peak_bytes"]) is not None and (budget := self._config.memory.budget_gib) is not None:
            self._print(f"memory: a step takes {size_text(peak)} of {size_text(budget * 2**30)} on a rank's device")
        for part in values["data"]:
            self._part(part)
        if self._first == self._last:
            self._print(f"complete: step {self._first} is saved; raise run.steps to go on, or start anew with --fresh")
        elif self._first:
            self._print(f"continuing after step {self._first}; start anew with --fresh")
        elif (start := self._config.checkpoint.start) is not None:
            self._print(f"beginning with the weights of {escape(str(start))}")
        elif (promise := _promise(self._config)) is not None:
            self._print(f"expected: {promise}")

    def _part(self, part: Values) -> None:
        """A line about a source, where there is more to say than that all of it is read."""
        padded, counted = (part[name] / part["positions"] for name in ("padded", "counted"))
        if part["share"] < 1 or padded or counted < 1:
            self._print(
                f"  {escape(part['path'])}: {part['share']:.1%} of the samples; {part['samples']:,} an epoch, "
                f"{padded:.1%} padded, {counted:.1%} counts, {part['cut']:,} documents cut"
            )

    def _step(self, values: Values) -> None:
        step = values["step"]
        done = step - self._first
        left = (time.monotonic() - self._started) / max(done, 1) * (self._last - step)
        self._print(
            f"step {step:>{len(str(self._last))}}/{self._last}  loss {values['loss']:.4f}  "
            f"grad norm {values['grad_norm']:.3f}  lr {values['lr']:.2e}  {values['tokens_per_s']:,.0f} tokens/s  "
            f"{size_text(values['memory_gib'] * 2**30)}  {_clock(left)} left"
        )

    def _trace(self, values: Values) -> None:
        """Where the trace is, and which passes ended when, beside a simulation of them and of messages."""
        first, last = values["first"], values["first"] + values["steps"] - 1
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        self._print(
            f"\n[bold]trace[/] of {steps}: {escape(values['path'])}; [bold]shoal report "
            f"{escape(shlex.quote(str(Path(values['path']).parent)))}[/] lays it over the simulation, and "
            "https://ui.perfetto.dev opens it"
        )
        if "late" not in values:
            return
        took, simulated = values["passes_ms"], values["simulated_ms"]
        self._print(
            f"  first pass to last: {took:.1f} ms; simulated with the same times of passes and messages "
            f"{simulated:.1f} ms ({took / simulated - 1:+.1%})"
        )
        self._print("  [dim]stage  pass       time    late: median       most[/]")
        for one in values["late"]:
            self._print(
                f"  {one['stage']:>5}  {one['pass']:>4}  {one['ms']:>6.2f} ms  {one['late_ms']:>10.2f} ms  "
                f"{one['most_late_ms']:>6.2f} ms"
            )

    def _memory(self, values: Values) -> None:
        """Where the memory of a step is, and the most that a rank held."""
        host = values["host_bytes"]
        beside = f", and {size_text(host)} on the host" if host else ""
        self._print(
            f"\n[bold]memory[/] of step {values['step']}: {escape(values['path'])}; [bold]shoal report "
            f"{escape(shlex.quote(str(Path(values['path']).parent)))} --memory[/] shows it\n"
            f"  most: {size_text(values['bytes'])} on rank {values['rank']}, {values['phase']}{beside}"
        )

    def _end(self, values: Values) -> None:
        run, folder = self._config.run, self._config.run.folder / self._config.run.name
        spent, step = _clock(time.monotonic() - self._started), values["step"]
        loss = values["validation_loss"]
        if step < run.steps:
            validation = "" if loss is None else f", validation loss [bold]{loss:.4f}[/]"
            self._print(f"[bold]stopped[/] in {spent} after step {step} of {run.steps}, as run.stop says{validation}.")
        elif loss is None:
            self._print(f"[bold green]done[/] in {spent}, at step {step}.")
        else:
            promised = "" if run.expected_loss is None else f" (this file promises {run.expected_loss:.2f})"
            self._print(f"[bold green]done[/] in {spent}: final validation loss [bold]{loss:.4f}[/]{promised}.")
        self._print(to_try(_next(self._config, folder, step, self._layout, self._written)))

    def _print(self, text: str) -> None:
        self._console.print(text)


def _promise(config: Config) -> str | None:
    run = config.run
    parts = []
    if run.expected_minutes is not None:
        parts.append(f"about {run.expected_minutes:g} minutes on two CPU cores")
    if run.expected_loss is not None:
        parts.append(f"final validation loss about {run.expected_loss:.2f}")
    return ", ".join(parts) or None


def _next(config: Config, folder: Path, step: int, layout: str, written: Sequence[str]) -> Iterator[tuple[str, str]]:
    name = shlex.quote(str(folder))
    if step < config.run.steps:
        yield f"go on to step {config.run.steps}", f"shoal train {name}/run.toml --set run.stop=0"
    if config.data.source == "tokens":
        yield "more text from this model", f'shoal generate {name} --prompt "In the beginning"'
    yield "what was saved", f"shoal inspect {name}"
    if "trace" in written:
        yield "what its steps did", f"shoal report {name}"
    if "memory" in written:
        yield "what a step held", f"shoal report {name} --memory"
    if config.checkpoint.start is not None:
        yield "a folder for transformers", f"shoal export {name} {name}-hf"
    plan = _compared(Layout.parse(layout), config.data.batch)
    if plan is not None:
        yield "proof that a layout computes it", f"shoal verify {name}/run.toml --layout {shlex.quote(str(plan))}"


def _compared(layout: Layout, batch: int) -> Layout | None:
    """What to compare with one process: the run's own layout, as exact as verify asks for; or, of a run that is one
    process itself, two replicas; None where the batch cannot be halved."""
    exact = layout.dtype if layout.dtype in ("float32", "float64") else "float64"
    layout = replace(layout, dtype=exact, half_grads=False, int8_gather=False, int8_reduce=False)
    if str(replace(layout, dtype=Layout.dtype)) != "dp=1":
        return layout
    return replace(layout, dp=2) if batch % 2 == 0 else None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
