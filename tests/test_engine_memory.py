"""Bytes that a rank holds, by the meter: model states under ZeRO, activations in flight, an engine while it is built.

Everything is float64. N replicas; Ψ parameters; p stages, of which a rank has one, r; m micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal import build
from shoal.comm.world import World
from shoal.config import Config, load
from shoal.engine import Engine
from shoal.layout import Layout
from shoal.meter import Meter
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, make_model, materialise_alone, open_data

RUNS = Path(__file__).parents[1] / "runs"
STATES = ("parameters", "gradients", "moments")
WORD = 8
SMALL = 8192
"""Bytes of scalars, and of a batch's labels and positions."""

Bytes = dict[str, int]


def read(run: str, **settings: object) -> Config:
    given = {"data__seq_len": 8, "model__vocab": 96, **settings}
    return load(RUNS / f"{run}.toml", [f"{key.replace('__', '.')}={value}" for key, value in given.items()])


def parse(line: str) -> Layout:
    return Layout.parse(f"{line},dtype=float64")


def parameters(config: Config) -> list[int]:
    """Of each layer, embedding and head included."""
    return [sum(p.numel() for p in layer.parameters()) for _, layer in make_model(config, parse("dp=1")).layers()]


class Highest(Meter):
    """Also knows the most that each category had, whenever that was."""

    def __init__(self) -> None:
        super().__init__()
        self.most: Counter[str] = Counter()

    def _record(self) -> None:
        super()._record()
        self.most |= Counter(self.snapshot())


def model_states(world: World, config: Config, line: str) -> tuple[Bytes, Bytes, Bytes]:
    """By category: when gradients are reduced, when the step is over, and the most of each in it. Of a second step."""
    engine = make_engine(config, parse(line), world)
    with Highest() as meter:
        for flat in engine._sync.flats:
            meter.label("parameters", [flat.params, flat.own_params])
            meter.label("gradients", [flat.grads, flat.own_grads])
            meter.label("moments", flat.states.values())
        seen = []

        def reduced() -> None:
            meter.label("gradients", [fragment.tensor for fragment in engine.gradients()])  # where nobody shares them
            seen.append(meter.snapshot())

        engine.on_gradients = reduced
        for step in range(2):
            meter.most.clear()
            with meter.phase("forward"):
                engine.step(open_data(config).batch(step, engine.mesh.coords["dp"], engine.layout.dp))
            seen.append(meter.snapshot())
        return seen[2], seen[3], dict(meter.most)


def shares(zero: int, replicas: int) -> list[float]:
    """What a rank keeps of Ψ parameters, Ψ gradients and 2Ψ moments (Rajbhandari et al. 2020)."""
    return [1 / replicas if zero >= stage else 1.0 for stage in (3, 2, 1)]


@pytest.mark.parametrize(
    ("replicas", "zero"),
    [
        (1, 3),
        (2, 0),
        (2, 1),
        (2, 2),
        (2, 3),
        pytest.param(4, 1, marks=pytest.mark.parity),
        pytest.param(4, 3, marks=pytest.mark.parity),
    ],
)
def test_model_states_take_what_the_stage_of_zero_says(replicas: int, zero: int, pool: Pool) -> None:
    """To the byte, where sizes divide."""
    config = read("tiny", model__layers=2)
    psi = sum(parameters(config))
    words = [share * psi for share in shares(zero, replicas)]
    expected = dict(zip(STATES, (words[0] * WORD, words[1] * WORD, 2 * words[2] * WORD), strict=True))
    for reduced, after, _ in pool.run(model_states, config, f"dp={replicas},zero={zero},mb=2", ranks=replicas):
        assert {kind: reduced[kind] for kind in STATES} == expected
        expected["gradients"] *= replicas > 1  # what nobody shares goes with the update
        assert {kind: after.get(kind, 0) for kind in STATES} == expected
        assert sum(after.values()) - sum(expected.values()) < SMALL, "nothing else of size outlives a step"


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_what_zero_3_has_whole_at_once(micro_batches: int, pool: Pool) -> None:
    """The parameters of a layer and of the one that follows; gradients of the layer whose backward pass runs and of two
    that are under way. However many micro-batches there are."""
    config = read("tiny", model__layers=4)
    share, largest = sum(parameters(config)) * WORD // 2, max(parameters(config)) * WORD
    for _, _, most in pool.run(model_states, config, f"dp=2,zero=3,mb={micro_batches}", ranks=2):
        assert share + largest < most["parameters"] <= share + 2 * largest
        assert share + largest < most["gradients"] <= share + 3 * largest


@pytest.mark.parametrize("zero", [1, 3])
def test_uneven_model_states_are_padded_by_less_than_a_word_a_rank_and_bucket(zero: int, pool: Pool) -> None:
    config = read("tiny6", model__layers=2)
    psi, buckets = sum(parameters(config)), 4 if zero == 3 else 1
    for reduced, _, _ in pool.run(model_states, config, f"dp=3,zero={zero}", ranks=3):
        for kind, copies, share in zip(STATES, (1, 1, 2), shares(zero, 3), strict=True):
            exact = copies * share * psi * WORD
            assert exact <= reduced[kind] < exact + copies * 3 * buckets * WORD


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.parity), 3])
def test_stages_divide_their_own_model_states(zero: int, pool: Pool) -> None:
    config = read("tiny", model__layers=4)
    layers = parameters(config)
    for rank, (reduced, after, _) in enumerate(
        pool.run(model_states, config, f"dp=2,pp=2{{layers=3/1}},zero={zero},mb=4", ranks=4)
    ):
        psi = sum(layers[:4] if rank < 2 else layers[4:])
        words = [share * psi for share in shares(zero, 2)]
        expected = [words[0] * WORD, words[1] * WORD, 2 * words[2] * WORD]
        assert [reduced[kind] for kind in STATES] == [after[kind] for kind in STATES] == expected


# ---- activations

SAMPLES, LENGTH, HIDDEN = 2, 64, 64
BOUNDARY = SAMPLES * LENGTH * HIDDEN * WORD
"""Bytes of the input of a block for one micro-batch."""


def activations(world: World, line: str, counts: Sequence[int]) -> list[int]:
    """For each number of micro-batches, all of one size: most bytes in a step beyond what is there between steps. Then
    the bytes of the rank's parameters."""
    found = []
    for count in counts:
        config = read("tiny", model__layers=4, model__dropout=0, data__seq_len=LENGTH, data__batch=SAMPLES * count)
        engine, source = make_engine(config, parse(f"{line},mb={count}"), world), open_data(config)
        with Meter() as meter:
            engine.step(source.batch(0))  # shows the meter what is there before
            batch, before = source.batch(1), meter.live()
            with meter.phase("step"):
                engine.step(batch)
            found.append(meter.peak("step") - before)
    return [*found, sum(one.numel() for one in engine.task.module.parameters()) * WORD]


def test_a_stage_keeps_the_activations_of_as_many_micro_batches_as_its_schedule_says(pool: Pool) -> None:
    """m under GPipe (Huang et al. 2019), min(p − r, m) under 1F1B (Narayanan et al. 2019); beside them the
    gradients, and at most three tensors of a boundary: the next input, the last output, and a gradient, on their way.
    With one micro-batch the most may be there in the backward pass, with one or two tensors more."""
    gpipe, one_f_one_b = (pool.run(activations, f"pp=4:{name}", (1, 2, 3, 6)) for name in ("gpipe", "1f1b"))
    for stage in range(4):
        alone, two, three, six, psi = gpipe[stage]
        each = three - two
        assert each > 15 * BOUNDARY
        assert six - three == pytest.approx(3 * each, abs=SMALL)
        for m, peak in zip((1, 2, 3, 6), one_f_one_b[stage][:4], strict=True):
            gradients = psi if m > 4 - stage else 0  # of those micro-batches whose backward pass is over
            beside = peak - alone - (min(4 - stage, m) - 1) * each - gradients
            assert -2 * BOUNDARY < beside < 3 * BOUNDARY + SMALL, f"stage {stage} of 4 with {m} micro-batches"


def test_what_is_recomputed_keeps_the_inputs_of_its_layers(pool: Pool) -> None:
    """Of each micro-batch in flight: the input of each block, and its rotary tables."""
    tables = 2 * SAMPLES * LENGTH * 4 * WORD
    kept, recomputed = (
        [four - three for three, four, _ in pool.run(activations, f"pp=2:gpipe{how}", (3, 4), ranks=2)]
        for how in ("", ",recompute=full")
    )
    assert recomputed[0] == pytest.approx(2 * BOUNDARY + tables, abs=1024)
    assert kept[0] > 15 * recomputed[0]
    # The last stage has the head, too, whose backward pass follows its forward pass at once.
    assert recomputed[1] - recomputed[0] == pytest.approx(kept[1] - kept[0], abs=1024)


# ---- building


def building(world: World, config: Config, line: str) -> tuple[int, int, int, int]:
    """Bytes at the peak and after it, the parameters that this rank holds or has a share of, and the largest bucket."""
    model = make_model(config, parse(line))
    with Meter() as meter:
        engine = Engine(model, parse(line), optimizer=config.optimizer, world=world)
        buckets = [flat.bucket for flat in engine._sync.flats]
        psi = sum(slot.stop - slot.start for bucket in buckets for slot in bucket.slots)
        return meter.peak(), meter.live(), psi, max(bucket.size for bucket in buckets)


@pytest.mark.parametrize("line", ["pp=4", "tp=4", "dp=2,zero=1"])
def test_a_rank_makes_only_what_it_holds(line: str, pool: Pool) -> None:
    """Also while it is built: moments take more than the initial values of one parameter."""
    config = read("tiny", model__layers=4)
    layout, total = parse(line), sum(parameters(config))
    shares = []
    for peak, after, psi, _ in pool.run(building, config, line, ranks=layout.ranks):
        held = (1 + (layout.dp > 1) + 2 / layout.dp) * psi * WORD  # gradients that nobody shares are made later
        assert held <= after <= peak < held + SMALL
        shares.append(psi)
    assert total <= sum(shares) / layout.dp < 1.02 * total, "norms alone are whole on every rank of tp"


@pytest.mark.parametrize(
    "line", ["dp=3,zero=3", "dp=2,pp=2,zero=3", pytest.param("dp=2,tp=2,zero=3", marks=pytest.mark.parity)]
)
def test_what_is_divided_is_made_a_bucket_at_a_time(line: str, pool: Pool) -> None:
    """Whole for that time: parameters and gradients of one bucket, and the initial values of one parameter."""
    config, layout = read("tiny", model__layers=8), parse(line)
    for peak, after, psi, bucket in pool.run(building, config, line, ranks=layout.ranks):
        held = 4 * psi * WORD / layout.dp
        assert held <= after < held + SMALL
        assert held <= peak < held + 2 * bucket * WORD + SMALL
        assert 3 * bucket < psi


# ---- all of it at once


def passes(config: Config) -> int:
    """The most bytes of activations, and of what a pass works with, in one process without an engine, which has the
    samples of one of two replicas and throws gradients away."""
    model = make_model(config, parse("dp=1"))
    materialise_alone(model, 0)
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    batch = open_data(config).batch(1, 0, 2)
    with Meter() as meter:
        meter.label("given", [*model.parameters(), *batch.values()])
        model(batch, model.context(batch)).backward()
        return meter.peak() - meter.live("given")


def peak(world: World, config: Config, line: str) -> int:
    """The most bytes that are alive in the second step. Buckets are of one layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "BUCKET_BYTES", 1)
        engine, source = make_engine(config, parse(line), world), open_data(config)
    with Meter() as meter:
        for flat in engine._sync.flats:
            meter.label("held", [flat.params, flat.own_params, flat.grads, flat.own_grads, *flat.states.values()])
        for step in range(2):
            batch = source.batch(step, world.rank, world.size)
            with meter.phase(f"step {step}"):
                engine.step(batch)
        return meter.peak("step 1")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_peak_of_a_step_is_that_of_the_formula(zero: int, pool: Pool) -> None:
    """Within 1 %: what the stage divides of Ψ parameters, Ψ gradients and 2Ψ moments; activations, which are most as
    the backward pass begins; then, what is whole of the last block and the one before: gradients under stage 2 and 3,
    parameters under stage 3."""
    config = read("tiny", model__layers=6, model__dropout=0, data__seq_len=64, data__batch=8)
    layers, words = parameters(config), shares(zero, 2)
    states = words[0] + words[1] + 2 * words[2]
    whole = {0: 0, 1: 0, 2: 1, 3: 3}[zero] * layers[1]
    expected = (states * sum(layers) + whole) * WORD + passes(config)
    for found in pool.run(peak, config, f"dp=2,zero={zero}", ranks=2):
        assert found == pytest.approx(expected, rel=0.01)
