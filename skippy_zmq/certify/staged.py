"""The same script through stages in this process, joined by the same handshake as stages on different machines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from skippy_zmq.certify.workload import LaneRows, Logits, Step
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.stage_model import Crossing, StageModel
from skippy_zmq.sources.gguf_model import GgufModel
from skippy_zmq.stage.facts import stage_facts
from skippy_zmq.stage.handshake import check_crossing, check_pipeline
from skippy_zmq.topology import split_at
from skippy_zmq.wire.messages import CrossingSpec


class StagedModel:
    """All stages of a model cut at ``boundaries``. Raises HandshakeError where they do not fit together.

    ``source``: of all stages, or one for each.
    """

    def __init__(
        self, source: GgufModel | Sequence[GgufModel], boundaries: Sequence[int], options: StageOptions
    ) -> None:
        sources = [source] * (len(boundaries) + 1) if isinstance(source, GgufModel) else source
        ranges = split_at(boundaries, sources[0].n_layers)
        # no limit on outputs: certification looks at the logits of whole prompts
        self.stages = [
            StageModel(own, layers, options, max_outputs=0) for own, layers in zip(sources, ranges, strict=True)
        ]
        facts = tuple(stage_facts(stage, "certify", f"stage-{i}", "") for i, stage in enumerate(self.stages))
        check_pipeline(facts)
        for upstream, downstream in pairwise(facts):
            check_crossing(upstream, downstream)
        for stage, following in pairwise(self.stages):
            stage.serve(following.wanted)

    @property
    def last(self) -> StageModel:
        return self.stages[-1]

    def crossing(self) -> dict[int, tuple[CrossingSpec, ...]]:
        """What crosses each boundary, by the layer that follows it."""
        return {stage.layers.start: stage.wanted for stage in self.stages[1:]}

    def decode(self, rows: Sequence[LaneRows], tokens: npt.NDArray[np.int32], outputs: Sequence[int]) -> list[Logits]:
        """One batch through all stages; logits [n_vocab] of each of ``outputs``."""
        tensors: list[Crossing] = []
        for stage in self.stages:
            tensors = stage.run(rows, tokens, outputs if stage is self.last else (), tensors)
        return [self.last.logits(row) for row in outputs]

    def trim(self, lane: int, position: int) -> None:
        for stage in self.stages:
            stage.trim(lane, position)

    def run(self, steps: Sequence[Step]) -> Logits:
        """Logits of all steps of a script, one row after the other."""
        n_vocab = self.last.n_vocab
        result = np.empty((sum(len(step.outputs) for step in steps), n_vocab), np.float32)
        done = 0
        for number, step in enumerate(steps):
            if step.forget is not None:
                self.trim(*step.forget)
            for logits in self.decode(step.rows, step.tokens(number, n_vocab), step.outputs):
                result[done] = logits
                done += 1
        return result
