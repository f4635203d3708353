"""What is measured of an evaluation."""

from torch import Tensor, nn
from torchmetrics import MetricCollection, SumMetric


class Meter(nn.Module):
    """Loss, metrics and number of samples of one evaluation, summed over all processes.

    Args:
        metrics: Metrics of outputs and targets, beside the loss.
    """

    def __init__(self, metrics: MetricCollection) -> None:
        super().__init__()
        self.metrics = metrics.clone()
        self.loss = SumMetric(nan_strategy="disable")  # MeanMetric drops its weights when it lets NaN through
        self.n = SumMetric(nan_strategy="disable")

    def update(self, outputs: Tensor, targets: Tensor, loss: Tensor) -> None:
        """Add a batch."""
        self.metrics.update(outputs, targets)
        self.loss.update(loss * len(outputs))
        self.n.update(len(outputs))

    def read(self, prefix: str) -> dict[str, Tensor]:
        """Return every value under ``prefix`` and start anew."""
        n = self.n.compute()
        values = {"loss": self.loss.compute() / n, **self.metrics.compute(), "n": n}
        for metric in (self.loss, self.metrics, self.n):
            metric.reset()
        return {prefix + name: value for name, value in values.items()}
