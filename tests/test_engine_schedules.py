"""Every pipeline schedule through the engine, thinly: all combinations are in tests/parity/test_schedules_parity.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_ranks import Array, Held, equal, held, put_together, weights

from shoal.comm.world import World
from shoal.config import Config, load
from shoal.engine import Engine
from shoal.layout import Layout
from shoal.model.decoder import Decoder
from shoal.model.generate import decoding
from shoal.train.pool import Pool
from shoal.train.reference import PlainTrainer
from shoal.train.setup import learning_rate, make_engine, make_model, materialise_alone, open_data
from shoal.train.verify import verify

RUNS = Path(__file__).parents[1] / "runs"
EXACT = 1e-12
PROMPT = [7, 201, 33]


def read(*more: str) -> Config:
    small = ("model.layers=4", "model.hidden=24", "model.heads=4", "model.kv_heads=2", "model.ffn=32")
    return load(RUNS / "tiny6.toml", [*small, "data.seq_len=6", "data.batch=8", "optimizer.clip=0.1", *more])


def exact(line: str) -> Layout:
    return Layout.parse(f"{line},dtype=float64")


@pytest.mark.parametrize(
    "line",
    [
        "pp=2:1f1b-overlap,mb=4",
        "pp=2:interleaved,mb=4",
        "pp=2:breadth-first,zero=3,dp=2,mb=2",
        "pp=4:zb-h1,mb=2",
        "pp=2:zb-h2{layers=3/1},mb=4,recompute=full",
        "dp=2,pp=2:zb-v,zero=2,mb=4",
        "pp=2:dualpipe-v,mb=4,recompute=selective",
        "tp=2,pp=2:zb-v,mb=2",
        "pp=2:list/2,mb=4",
        "pp=3:pipedream,mb=2",
        "dp=2,pp=2:2bw,zero=1,mb=2",
    ],
)
def test_a_schedule_agrees(line: str, pool: Pool) -> None:
    tied = "false" if "pipedream" in line else "true"
    report = verify(read(f"model.tied={tied}"), exact(line), pool, steps=4 if Layout.parse(line).asynchronous else 2)
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < 1e-12


def course(world: World, line: str, lengths: tuple[int, ...]) -> tuple[list[float], list[Held]]:
    engine = make_engine(read(), exact(line), world)
    losses = []
    for number, length in enumerate(lengths):
        source = open_data(read(f"data.seq_len={length}"))
        losses.append(engine.step(source.batch(number, engine.mesh.coords["dp"], engine.layout.dp)).loss)
    return losses, weights(engine)


@pytest.mark.parametrize("line", ["pp=2:zb-v,mb=4", "pp=2:interleaved,mb=4", "pp=4:zb-h1,mb=2"])
def test_the_length_of_sequences_may_change_between_steps(line: str, pool: Pool) -> None:
    lengths = (6, 11, 6, 1)
    found = pool.run(course, line, lengths, ranks=Layout.parse(line).ranks)
    model = alone()
    trainer = PlainTrainer(model, read().optimizer, learning_rate(read()), read().run.seed)
    sources = [open_data(read(f"data.seq_len={length}")) for length in lengths]
    expected = [trainer.step(source.batch(number)).loss for number, source in enumerate(sources)]
    assert [losses for losses, _ in found] == [pytest.approx(expected, rel=EXACT)] * len(found)
    whole = put_together(of_rank for _, of_rank in found)
    for name, weight in trainer._weights.items():
        torch.testing.assert_close(whole[name], weight.parameter.detach(), rtol=0, atol=EXACT)


def alone(full: dict[str, torch.Tensor] | None = None) -> Decoder:
    """The model in one process, as it begins or with the weights ``full``."""
    model = make_model(read(), exact("dp=1"))
    for one in materialise_alone(model, read().run.seed):
        for fragment in one.fragments("weight", one.parameter.detach()):
            if full is not None:
                fragment.tensor.copy_(full[fragment.piece.name])
    return model


# ---- bit for bit


def gradients(world: World, line: str) -> list[Held]:
    engine = make_engine(read("model.dropout=0"), exact(line), world)
    found: list[Held] = []
    engine.on_gradients = lambda: found.extend(held(engine.gradients(), "gradient"))
    engine.step(open_data(read()).batch(0))
    return found


@pytest.mark.parametrize("line", ["pp=2:gpipe,mb=4", "pp=2:1f1b,mb=4", "pp=2:zb-h1,mb=4"])
def test_gradients_are_those_of_one_process_bit_for_bit(line: str, pool: Pool) -> None:
    """Micro-batches are added up in the same order."""
    alone, whole = (put_together(pool.run(gradients, one, ranks=n)) for one, n in (("dp=1,mb=4", 1), (line, 2)))
    assert alone.keys() == whole.keys()
    assert [name for name in alone if not torch.equal(alone[name], whole[name])] == []


# ---- forward passes


def evaluate_and_speak(world: World, line: str) -> tuple[float, Array, list[Held], float]:
    """After two steps: the mean loss over other samples, logits, the weights that they are of, and what an evaluation
    says after another step."""
    config = read()
    engine = make_engine(config, exact(line), world)
    source = open_data(config)

    def batch(number: int) -> dict[str, torch.Tensor]:
        return source.batch(number, engine.mesh.coords["dp"], engine.layout.dp)

    for number in range(2):
        engine.step(batch(number))
    loss, weight = engine.evaluate(batch(9))
    logits = engine.decoding()(PROMPT).numpy()
    kept = weights(engine)
    engine.step(batch(2))
    after, _ = engine.evaluate(batch(9))
    return loss / weight, logits, kept, after / weight


@pytest.mark.parametrize("line", ["pp=2:zb-v,mb=4", "dp=2,pp=2:dualpipe-v,zero=1,mb=4", "pp=2:interleaved,mb=2",
                                  "pp=2:pipedream,mb=2", "pp=3:2bw,mb=4"])  # fmt: skip
def test_evaluation_and_generation_go_through_the_same_stages(line: str, pool: Pool) -> None:
    """Under an asynchronous schedule with the weights of all steps that were begun."""
    found = pool.run(evaluate_and_speak, line, ranks=Layout.parse(line).ranks)
    model = alone(put_together(of_rank for _, _, of_rank, _ in found))
    engine = Engine(model, Layout())
    loss, weight = engine.evaluate(open_data(read()).batch(9))
    expected = decoding(model)(PROMPT).numpy()
    for ours, logits, _, after in found:
        assert ours == pytest.approx(loss / weight, rel=EXACT)
        assert np.abs(logits - expected).max() < EXACT
        assert after != ours


# ---- checkpoints

Kept = tuple[list[Held], list[Held]]


def kept(engine: Engine) -> Kept:
    """What a rank has of the weights and of one of the optimizer's states."""
    return weights(engine), held(engine.fragments(), "exp_avg")


def save(world: World, line: str, folder: Path) -> tuple[Kept, list[int]]:
    """Save after three steps; what is held, and which steps have been told of."""
    engine = make_engine(read(), exact(line), world)
    source = open_data(read())
    told = []
    for number in range(3):
        engine.step(source.batch(number, engine.mesh.coords["dp"], engine.layout.dp))
        told += [one.step for one in engine.finished()]
    engine.save(folder)
    told += [one.step for one in engine.finished()]
    return kept(engine), told


def go_on(world: World, line: str, folder: Path) -> tuple[Kept, list[int], list[bool]]:
    """What is held after loading; then the steps that two more are told as, and whether each changed the weights."""
    engine = make_engine(read(), exact(line), world)
    engine.load(folder / "step-00000003")
    source = open_data(read())
    loaded = kept(engine)
    before, told, changed = loaded[0], [], []
    for number in (3, 4):
        engine.step(source.batch(number, engine.mesh.coords["dp"], engine.layout.dp))
        engine.drain()
        told += [one.step for one in engine.finished()]
        changed.append(not equal(before, weights(engine)))
        before = weights(engine)
    return loaded, told, changed


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("pp=2:zb-v,mb=4", "dp=2,pp=2:2bw,zero=1,mb=2"),
        ("pp=3:2bw,mb=4", "pp=2:interleaved,mb=4"),
        ("pp=2:pipedream,mb=2", "pp=4:pipedream,mb=4"),
        ("dp=2,pp=2:pipedream,zero=1,mb=2", "dp=1"),
    ],
)
def test_a_checkpoint_of_one_schedule_goes_on_under_another(
    saved: str, loaded: str, pool: Pool, tmp_path: Path
) -> None:
    """Saving ends what is under way: the weights and states are those of all steps that were begun."""
    before = pool.run(save, saved, tmp_path, ranks=Layout.parse(saved).ranks)
    assert [told for _, told in before] == [[1, 2, 3]] * len(before)
    after = pool.run(go_on, loaded, tmp_path, ranks=Layout.parse(loaded).ranks)
    assert [(told, changed) for _, told, changed in after] == [([4, 5], [True, True])] * len(after)
    for kind in range(2):
        expected = put_together(of_rank[kind] for of_rank, _ in before)
        found = put_together(of_rank[kind] for of_rank, *_ in after)
        assert found.keys() == expected.keys()
        assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
