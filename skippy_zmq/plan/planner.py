"""Cut a model: by memory and time, for machines given or for as many stages as wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skippy_zmq.errors import OptionError
from skippy_zmq.plan.compute_buffers import compute_bytes
from skippy_zmq.plan.costs import LayerCosts, layer_costs
from skippy_zmq.plan.kv_cache import CacheSettings
from skippy_zmq.plan.outline import Outline
from skippy_zmq.plan.partition import best_partition, longest_reach
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.topology import LayerRange, split_at, split_evenly

# How much of the time of a model goes to decoding: chats read some tokens for each that they write, and reading one
# takes a fraction of the time of writing one.
DEFAULT_DECODE_SHARE = 0.6
MAX_STAGES = 64


@dataclass(frozen=True, slots=True)
class Machine:
    """``memory``: bytes for one stage, None without a limit. ``speed``: relative to the other machines."""

    memory: int | None = None
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """Bytes that the stage will hold, and ``time``: its part of the time that one machine of speed 1 takes for all.

    ``compute`` is an estimate that errs upwards; ``memory`` is the limit it was planned for, if any.
    """

    layers: LayerRange
    weights: int
    kv: int
    compute: int
    time: float
    memory: int | None

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute


@dataclass(frozen=True, slots=True)
class Plan:
    stages: tuple[PlannedStage, ...]
    decode_share: float

    @property
    def ranges(self) -> list[LayerRange]:
        return [stage.layers for stage in self.stages]

    @property
    def balance(self) -> float:
        """Mean time of the stages over that of the slowest: 1.0 where none ever waits for another."""
        times = [stage.time for stage in self.stages]
        return sum(times) / len(times) / max(times) if max(times) else 1.0


def cache_settings(outline: Outline, options: StageOptions) -> CacheSettings:
    """What of ``options`` decides the size of caches and buffers."""
    return CacheSettings(
        n_ctx=options.ctx_size or outline.context_length,
        lanes=options.lanes,
        type_k=options.cache_type_k,
        type_v=options.cache_type_v,
        flash_attention=options.flash_attn != "off",
        full_window=options.swa_full,
        n_ubatch=options.ubatch_size,
    )


def plan_stages(
    outline: Outline, machines: Sequence[Machine], options: StageOptions, *, decode_share: float = DEFAULT_DECODE_SHARE
) -> Plan:
    """The best plan with one stage on each of ``machines``, in their order.

    Raises OptionError for values that make no sense, and where the model does not fit: then it says by how much.
    """
    if not 0.0 <= decode_share <= 1.0:
        raise OptionError(f"decode share: wanted 0 to 1, got {decode_share:g}")
    n_stages, n_layers = len(machines), outline.n_layers
    if n_stages > MAX_STAGES:
        raise OptionError(f"{n_stages} stages: wanted at most {MAX_STAGES}")
    if not 1 <= n_stages <= n_layers:
        split_evenly(n_stages, n_layers)  # says what is wrong
    for machine in machines:
        if not 0.0 < machine.speed < float("inf"):
            raise OptionError(f"speed: wanted a number above 0, got {machine.speed:g}")
    need = _Need(outline, options)
    times, head = need.costs.times(decode_share)
    speeds = [machine.speed for machine in machines]
    boundaries = best_partition(times, head, speeds, need.fits(machines))
    if boundaries is None:
        raise OptionError(_shortage(need, machines, options))
    stages = []
    for machine, layers in zip(machines, split_at(boundaries, n_layers), strict=True):
        work = sum(times[layers.start : layers.end]) + (head if layers.end == n_layers else 0.0)
        stages.append(
            PlannedStage(
                layers,
                need.costs.weights_bytes(layers.start, layers.end),
                need.costs.cache_bytes(layers.start, layers.end),
                need.compute(layers.start, layers.end),
                work / machine.speed,
                machine.memory,
            )
        )
    return Plan(tuple(stages), decode_share)


def balanced_split(outline: Outline, n_stages: int, options: StageOptions) -> list[LayerRange]:
    """Layer ranges of ``n_stages`` stages that take equally long; raise OptionError for a number that cannot be."""
    return plan_stages(outline, [Machine()] * n_stages, options).ranges


class _Need:
    """Bytes that a range of layers needs."""

    def __init__(self, outline: Outline, options: StageOptions) -> None:
        settings = cache_settings(outline, options)
        self.costs: LayerCosts = layer_costs(outline, settings)
        self._tied = outline.tied_output
        self._with_head = compute_bytes(outline, settings, has_head=True)
        self._without = compute_bytes(outline, settings, has_head=False)
        self._totals: dict[tuple[int, int], int] = {}

    @property
    def n_layers(self) -> int:
        return self.costs.n_layers

    def compute(self, start: int, end: int) -> int:
        return self._with_head if end == self.n_layers or (start == 0 and self._tied) else self._without

    def total(self, start: int, end: int) -> int:
        if (start, end) not in self._totals:
            held = self.costs.weights_bytes(start, end) + self.costs.cache_bytes(start, end)
            self._totals[start, end] = held + self.compute(start, end)
        return self._totals[start, end]

    def fits(self, machines: Sequence[Machine], more: int = 0) -> Callable[[int, int, int], bool]:
        def answer(stage: int, start: int, end: int) -> bool:
            memory = machines[stage].memory
            return memory is None or self.total(start, end) <= memory + more

        return answer


def _shortage(need: _Need, machines: Sequence[Machine], options: StageOptions) -> str:
    """Why no plan fits, and what would help."""
    n = need.n_layers
    low, high = 0, need.total(0, n)
    while high - low > 1:  # the least that would have to be added to every limit
        more = (low + high) // 2
        if longest_reach(n, len(machines), need.fits(machines, more)) == n:
            high = more
        else:
            low = more
    reach = longest_reach(n, len(machines), need.fits(machines))
    limits = [machine.memory for machine in machines if machine.memory is not None]
    kv = need.costs.cache_bytes(0, n)
    text = (
        f"the model does not fit: layers {reach}:{n} of {n} are left over. Alone it needs "
        f"{amount(need.costs.weights_bytes(0, n))} for weights, {amount(kv)} for KV caches of {options.lanes} lanes "
        f"and about {amount(need.compute(0, n))} for buffers, {len(machines)} "
        f"stage{'s' if len(machines) > 1 else ''} have {amount(sum(limits))}; "
        f"{'each stage' if len(limits) > 1 else 'it'} lacks {amount(high)}. Give more memory, another stage"
    )
    if kv > high:
        text += ", or a smaller --ctx-size, --lanes or KV cache type"
    return text


def amount(nbytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
