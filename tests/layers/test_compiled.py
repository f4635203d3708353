"""Compiling part by part: one graph for all blocks, the same numbers, gradients block after block."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from vitlab.layers.block import Block
from vitlab.layers.compiled import compile_parts, mark_batch
from vitlab.layers.drop_path import DropPath
from vitlab.models import VisionTransformer
from vitlab.pretraining import MAE
from vitlab.tasks import Classifier

TINY = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 5, "num_heads": 2, "num_classes": 3}


pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch looks at it
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # torch's own, while it records and tunes
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture(autouse=True)
def fresh():
    limit = torch._dynamo.config.recompile_limit
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = limit


@pytest.mark.slow
@pytest.mark.parametrize("pos_embed", ["learned", "rope_mixed", "relpos"])
def test_blocks_share_their_graph_and_the_numbers_stay(pos_embed):
    torch.manual_seed(0)
    net, images = VisionTransformer(**TINY, pos_embed=pos_embed), torch.randn(4, 3, 16, 16)
    outputs = net(images)
    expected = torch.autograd.grad(outputs.square().sum(), list(net.parameters()))
    counter = CompileCounter()
    compile_parts(net, backend=counter)
    compiled = net(images)
    torch.testing.assert_close(compiled, outputs)
    torch.testing.assert_close(torch.autograd.grad(compiled.square().sum(), list(net.parameters())), expected)
    assert counter.frame_count <= 3, "the tokenizer, block 0, and the blocks from 1 on, whose number is an argument"


@pytest.mark.rare
@pytest.mark.slow
def test_blocks_that_drop_more_and_more_images_share_their_graph():
    net, counter = VisionTransformer(**TINY | {"depth": 8}, drop_path_rate=0.4), CompileCounter()
    compile_parts(net, backend="aot_eager")  # which knows best whether a number can be an argument
    graphs = [counters["stats"]["unique_graphs"]]
    for side in (16, 24, 32):
        net(torch.randn(4, 3, side, side)).sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    added = [after - before for before, after in pairwise(graphs)]
    assert all(more <= most for more, most in zip(added, (4, 3, 0), strict=True)), "as many as for any number of blocks"
    drop_path = torch.compile(DropPath(0.4), backend=counter)
    values, counts = drop_path(torch.zeros(9000, 1, 1), torch.ones_like).unique(return_counts=True)
    torch.testing.assert_close(values, torch.tensor([0, 1 / 0.6]))
    assert counts[0] / 9000 == pytest.approx(0.4, abs=0.025)  # five standard errors


@pytest.mark.slow
def test_the_gradients_of_a_block_are_ready_before_earlier_blocks_are_computed():
    net, order = VisionTransformer(**TINY), []
    compile_parts(net, backend="aot_eager")
    for i, block in enumerate(net.blocks):
        for parameter in block.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i))
    net(torch.randn(2, 3, 16, 16)).sum().backward()
    assert order == sorted(order, reverse=True) and len(set(order)) == 5


@pytest.mark.slow
def test_a_task_compiles_its_blocks_and_tokenizers_in_its_mode_under_the_same_names(monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda part, **options: compiled.append((part, options["mode"])))
    for task, mode, expected in (
        (Classifier(**TINY, compile=True), True, "default"),
        (Classifier(**TINY, compile="reduce-overhead"), "reduce-overhead", "reduce-overhead"),
        (MAE(**{k: v for k, v in TINY.items() if k != "num_classes"}), "max-autotune", "max-autotune"),
        (Classifier(**TINY), False, None),
    ):
        compiled.clear()
        compile_parts(task, mode)
        blocks = [module for module in task.modules() if isinstance(module, Block)]
        parts = [task.net.tokenizer, *blocks] if expected else []
        assert {(id(part), mode) for part, mode in compiled} == {(id(part), expected) for part in parts}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_a_compiled_step_on_a_gpu_is_the_plain_one(mode):
    net, images = VisionTransformer(**TINY).cuda(), torch.randn(4, 3, 16, 16, device="cuda")
    outputs = net(images)
    expected = torch.autograd.grad(outputs.square().sum(), list(net.parameters()))
    compile_parts(net, mode)
    for _ in range(3):  # the first of these record, the last is replayed
        mark_batch(mode, images.device)
        found = torch.autograd.grad(net(images).square().sum(), list(net.parameters()))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    for _ in range(3):  # without a backward pass
        mark_batch(mode, images.device)
        with torch.no_grad():
            torch.testing.assert_close(net(images), outputs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", [False, True, "default", "reduce-overhead", "max-autotune"])
def test_each_batch_of_training_and_validation_is_marked_where_kernels_are_recorded(mode, monkeypatch):
    told: list[str] = []
    for name, value in {"device": torch.device("cuda"), "current_epoch": 0, "global_step": 0, "global_rank": 0}.items():
        monkeypatch.setattr(Classifier, name, value)
    monkeypatch.setattr("vitlab.tasks.base.seed_step", lambda *args: told.append("step"))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: told.append("mark"))
    task = Classifier(**TINY, compile=mode)
    task._stream_seed = 0
    task.on_train_batch_start(None, 0)
    task.on_validation_batch_start(None, 0)
    marks = ["mark"] if mode in ("reduce-overhead", "max-autotune") else []
    assert told == [*marks, "step", *marks]
