"""Numbers that a training step gathers: losses, rows and tokens that count, and the metrics of micro-batches."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch.optim import Optimizer

from megatron_ext.policy.data.batch_plan import Counts, MicroBatchBounds
from megatron_ext.policy.losses.worker_protocol import LossFunction, LossType

Metrics = list[dict[str, float]]  # of each micro-batch


@dataclass
class OpenStep:
    """Step that is not finished, with what it has gathered. Rows and tokens are those of all data-parallel ranks."""

    loss_fn: LossFunction
    bounds: MicroBatchBounds
    parts: int = 0
    loss: float = 0.0
    counts: Counts = field(default_factory=lambda: Counts(0.0, 0.0))
    metrics: Metrics = field(default_factory=list)

    def add(self, counts: Counts, loss: float, metrics: Metrics) -> None:
        """One more part of the step."""
        self.parts += 1
        self.loss += loss
        self.counts = Counts(*(a + b for a, b in zip(self.counts, counts, strict=True)))
        self.metrics += metrics

    def scale(self, name: str) -> float:
        """Return the factor of a metric of this name."""
        kinds = getattr(self.loss_fn, "metric_normalizations", None)
        kind = kinds.get(name) if isinstance(kinds, Mapping) else None
        return self.scale_of_loss if kind is None else 1 / self._divisors()[kind.value]

    @property
    def scale_of_loss(self) -> float:
        """Return the factor that makes the loss a mean: over rows or tokens, as its `loss_type` says."""
        kind = getattr(getattr(self.loss_fn, "loss_type", None), "value", None)
        return 1 / self._divisors()["sequences" if kind == LossType.SEQUENCE_LEVEL.value else "tokens"]

    def _divisors(self) -> dict[str, float]:
        """By the names of NeMo-RL's `MetricNormalizer`; where nothing counts 1, of sums that are 0."""
        rows, tokens = self.counts
        return {"tokens": tokens or 1.0, "sequences": rows or 1.0, "none": 1.0}


class StepMetrics:
    """The metrics of micro-batches by name, as `train` returns them."""

    def __init__(self, optimizer: Optimizer | None):
        self._optimizer = optimizer
        self._found: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, found: Metrics, counts: Counts, scale: Callable[[str], float]) -> None:
        """The metrics of micro-batches, times `scale` of their names, without those of which no row counts."""
        for numbers in found:
            valid = numbers.pop("num_valid_samples", 1.0)
            if valid <= 0:
                continue
            row = {}
            for name, value in numbers.items():
                extreme = "_min" in name or "_max" in name  # these are not added up, as in NeMo-RL
                row[name] = value if extreme else value * scale(name)
            row |= {"num_valid_samples": valid, **counts._asdict()}
            if self._optimizer is not None:
                row["lr"] = self._optimizer.param_groups[0]["lr"]
            for name, value in row.items():
                self._found[name].append(value)

    def by_name(self) -> dict[str, list[float]]:
        return dict(self._found)
