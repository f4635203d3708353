"""A step on a GPU, traced with tensors that have no memory: nothing in it waits for the GPU."""

from collections import Counter

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vitlab.data.loading.loader import send
from vitlab.data.loading.mix import Mix
from vitlab.data.loading.order import TrainOrder
from vitlab.data.loading.pipeline import Pipeline
from vitlab.data.loading.tensor_loader import TensorLoader
from vitlab.tasks import Classifier
from vitlab.tasks.optimizer import build_optimizer

CUDA = torch.device("cuda")
aten = torch.ops.aten


class Waits(TorchDispatchMode):
    """Note each operation for which the host waits for the GPU, or the GPU for the host's pageable memory."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (aten._to_copy.default, aten.copy_.default):
            source = args[0] if func is aten._to_copy.default else args[1]
            target = (
                torch.device(kwargs.get("device") or args[0].device)
                if func is aten._to_copy.default
                else args[0].device
            )
            if source.device.type != target.type and not (kwargs.get("non_blocking") or args[2:] == (True,)):
                self.seen.append(str(func))
        if func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default):
            self.seen.append(str(func))
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def no_pinning(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


def faked():
    return FakeTensorMode(allow_non_fake_inputs=True)


def go_back(loss):
    """Fill ``grad`` node by node: autograd's engine wants a real device."""
    missing, found, stack = Counter(), {loss.grad_fn}, [loss.grad_fn]
    while stack:
        after = [node for node, _ in stack.pop().next_functions if node is not None]
        missing.update(after)
        stack += [node for node in dict.fromkeys(after) if node not in found]
        found.update(after)
    gradients, ready = {loss.grad_fn: {0: torch.ones_like(loss)}}, [loss.grad_fn]
    while ready:
        node = ready.pop()
        given = gradients.pop(node)
        if hasattr(node, "variable"):
            node.variable.grad = given[0]
            continue
        results = node(*(given.get(i) for i in range(len(node._input_metadata))))
        results = results if isinstance(results, tuple) else (results,)
        for (after, i), gradient in zip(node.next_functions, results, strict=True):
            if after is None:
                continue
            sums = gradients.setdefault(after, {})
            if gradient is not None:
                like = after._input_metadata[i]
                gradient = gradient.sum_to_size(like.shape).to(like.dtype)
                sums[i] = sums[i] + gradient if i in sums else gradient
            missing[after] -= 1
            ready += [] if missing[after] else [after]


def test_the_backward_pass_is_that_of_autograd():
    net = Classifier(in_chans=3, num_classes=5, img_size=32, embed_dim=48, depth=2, num_heads=3, patch_size=8)
    losses = [net(torch.ones(2, 3, 32, 32)).square().mean() for _ in range(2)]
    go_back(losses[0])
    expected = torch.autograd.grad(losses[1], list(net.net.parameters()))
    torch.testing.assert_close([p.grad for p in net.net.parameters()], list(expected))


def test_a_copy_that_waits_for_the_device_is_detected():
    with faked(), Waits() as waits:
        x = torch.ones(3).to(CUDA)
        x[[0, 2]]
        x.to("cuda", non_blocking=True)
        send(torch.ones(3), CUDA)
    assert len(waits.seen) == 2


@pytest.mark.rare
@pytest.mark.parametrize(
    "options",
    [
        {"pos_embed": "relpos"},
        {"pos_embed": "rope2d", "loss": "ce"},
        {"pos_embed": "alibi2d", "nan_loss": "skip"},
        {"pos_embed": "conv", "tokenizer": "t2t", "t2t_attn": "transformer"},
    ],
)
def test_a_step_from_pixels_to_the_new_weights_waits_for_nothing(monkeypatch, options):
    net = {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 3, "drop_path_rate": 0.1, "patch_size": 8}
    task = Classifier(in_chans=3, num_classes=5, **net | options)
    pipeline, mix = Pipeline((32, 32), (32, 32), "crop-flip", None, None, "bicubic"), Mix(0.8, 1.0, 0.9, 5)
    statistics = (0.5, 0.4, 0.3), (0.25, 0.25, 0.25)
    order = TrainOrder(64, 16, seed=0)
    steps = list(order.steps(0))  # which the host draws
    monkeypatch.setattr(order, "steps", lambda start: iter(steps))
    with faked():
        task = task.to(CUDA).train()
        images = torch.empty(64, 3, 32, 32, dtype=torch.uint8, device=CUDA)
        labels = torch.zeros(64, dtype=torch.int64, device=CUDA)
        loader = TensorLoader(images, labels, order, (32, 32), pad=4)
        optimizer = build_optimizer("adamw", task.optimizer_groups(), 1e-3)
        for _ in range(2):  # what is made once may wait in the first
            with Waits() as waits:
                for pixels, targets, step in loader:
                    batch = mix(pipeline.normalize(pixels, statistics), targets, step)
                    go_back(task.training_step(batch, 0))
                    torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
    assert waits.seen == []
