"""Why a plan is what it is: what binds it, why the others lost, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import exp

from shoal.errors import ConfigError, setting
from shoal.plan.hardware import Cluster
from shoal.plan.profile import Constants, errors
from shoal.plan.search import Found, Plan, Search
from shoal.plan.work import Job

TERMS = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "reading and writing memory",
    "launch": "starting kernels",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "exchanging tokens between experts",
    "gather": "gathering parameters (ZeRO-3)",
    "bubble": "the pipeline's bubble",
    "data": "data-parallel communication",
    "optimizer": "the optimizer",
    "cores": "waiting for a core that other ranks use",
    "jitter": "pace of the framework, and waiting for the slowest",
}
_COMPUTE = ("matmul", "attention", "elementwise", "launch", "jitter")


def interval(seconds: float) -> tuple[float, float]:
    """Where four of five steps that were predicted so lay, of runs that nothing was fitted to."""
    off = errors()
    return seconds * exp(-off["high"]), seconds * exp(-off["low"])


def binding(plan: Plan, room_gib: float) -> str:
    """What a faster step would have to change."""
    terms = plan.estimate.terms
    total = plan.estimate.step_s
    name = max((name for name in terms if name not in _COMPUTE), key=lambda name: terms[name])
    shares = [f"{TERMS[name]} takes {100 * terms[name] / total:.0f} % of the step"]
    compute = sum(terms[name] for name in ("matmul", "attention")) / total
    if compute > 0.6:
        shares.insert(0, f"the devices compute for {100 * compute:.0f} % of it")
    if plan.gib > 0.9 * room_gib:
        shares.append(f"memory is full, {plan.gib:.1f} of {room_gib:.1f} GiB")
    return "; ".join(shares)


def lost(plan: Plan, best: Plan) -> str:
    """Why one plan takes longer than the best: the terms that grew most."""
    grown = {name: plan.estimate.terms[name] - best.estimate.terms[name] for name in TERMS}
    name = max(grown, key=lambda one: grown[one])
    more = plan.estimate.step_s - best.estimate.step_s
    if more <= 0:
        return "the best"
    return f"+{1000 * more:.0f} ms: {TERMS[name]} +{1000 * grown[name]:.0f} ms"


def sensitivity(job: Job, found: Found, constants: Constants) -> Iterator[tuple[str, float, str]]:
    """(what changes, seconds of a step then, in words) for the best plans, timed again."""
    best = found.plans[0]

    def fastest(changed: Job) -> Plan:
        search = Search(changed, constants)
        return min((search.price(plan.split) for plan in found.plans[:3]), key=lambda plan: plan.estimate.step_s)

    cluster = job.cluster
    if cluster.nodes > 1:
        wider = fastest(replace(job, cluster=replace(cluster, nic=2 * cluster.nic)))
        yield "one more network card a device", wider.estimate.step_s, _difference(wider, best)
    search = Search(job, constants)
    within = [plan for _, split in found.nearly if (plan := search.price(split)).gib < 2 * cluster.device.memory_gib]
    larger = min(within, key=lambda plan: plan.estimate.step_s, default=best)
    if larger.estimate.step_s < best.estimate.step_s:
        text = f"{_difference(larger, best)}, with {larger.gib:.0f} GiB a device"
        yield "more memory", larger.estimate.step_s, text
    if job.width == 2 and job.profile.gradient_bytes > 2:
        half = fastest(replace(job, profile=replace(job.profile, gradient_bytes=2, reduce_bytes=2)))
        yield "bf16 gradients", half.estimate.step_s, f"{_difference(half, best)}, {half.gib - best.gib:+.1f} GiB"


def _difference(plan: Plan, best: Plan) -> str:
    return f"{100 * (plan.estimate.step_s / best.estimate.step_s - 1):+.1f} %"


def nothing_fits(job: Job, constants: Constants) -> ConfigError:
    """The refusal, which names the smallest cluster of the kind that would do."""
    cluster = job.cluster
    states = job.shape.parameters * (job.width + job.profile.gradient_bytes + job.profile.state_bytes) / 2**30
    problem = f"no layout fits: {job.shape.parameters / 1e9:.3g} billion parameters have {states:,.0f} GiB of states"
    smallest = _smallest(job, constants)
    legal = f"use {smallest}" if smallest else "use devices of more memory, or a smaller model or sequence"
    return ConfigError(setting("cluster", cluster.name, problem, legal))


def _smallest(job: Job, constants: Constants) -> str | None:
    """By doubling: first to whole nodes, then their number."""
    ranks = job.cluster.ranks
    for _ in range(14):
        ranks *= 2
        larger = _sized(job.cluster, ranks)
        if larger.ranks > job.batch * 512:
            break
        if Search(replace(job, cluster=larger), constants).run(1).plans:
            return larger.name
    return None


def _sized(cluster: Cluster, ranks: int) -> Cluster:
    device = cluster.device
    per_node = min(max(cluster.per_node, device.per_node), ranks)
    nodes = -(-ranks // per_node)
    name = f"{per_node}x{device.name}" if nodes == 1 else f"{nodes}x{per_node}x{device.name}:{8 * cluster.nic:.0f}G"
    return Cluster(name, device, nodes, per_node, cluster.nic)
