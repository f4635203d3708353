"""Model FLOPs utilization: how much of a GPU's peak arithmetic training uses."""

from typing import Any

import torch

# Dense 16-bit tensor-core rates in TFLOP/s with float32 accumulation, from NVIDIA's data sheets; the first name that
# matches counts. Lightning's table mixes these with sparse and scalar rates.
PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "A40": 149.7,
    "L40S": 362.0,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def peak_flops(device: torch.device) -> float | None:
    """Return the dense 16-bit peak of a GPU in FLOP/s; None for other devices and unknown names."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    words = f" {name.replace('-', ' ')} "
    return next((1e12 * peak for key, peak in PEAKS.items() if f" {key} " in words), None)


class Speed:
    """Model FLOPs utilization, Chowdhery et al. 2022 (arXiv:2204.02311): useful operations as a share of the peak.

    Useful are those of one forward and one backward pass of the network, three times the forward pass. Recomputation by
    gradient checkpointing and a teacher do not count. The peak is that of 16 bits, whatever the precision.

    Args:
        facts: ``flops`` of a forward pass of one image, or ``flops_from``, pairs of first epoch and FLOPs.
        trainer: The trainer.
    """

    def __init__(self, facts: dict[str, Any], trainer: Any) -> None:
        self.devices = trainer.world_size
        self.flops_from = facts.get("flops_from", [[0, facts.get("flops", 0)]])
        pipeline = getattr(getattr(trainer, "datamodule", None), "pipeline", None)
        varies = getattr(pipeline, "native", None)  # with images of any sizes, the FLOPs are those of the largest
        self.peak = None if varies else peak_flops(trainer.strategy.root_device)

    def utilization(self, images_per_second: float, epoch: int = 0) -> dict[str, float]:
        """Return the utilization at the total speed of all devices; empty if the peak is unknown."""
        flops = [flops for start, flops in self.flops_from if start <= epoch][-1]
        return {"mfu": 3 * flops * images_per_second / (self.peak * self.devices)} if self.peak else {}
