"""Look into a network's calls for as long as a ``with`` block lasts, and leave the network as it was."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def modes_kept(net: nn.Module) -> Iterator[None]:
    """Give each module its mode, of training or evaluation, back at the end of a ``with`` block.

    Example:
        >>> net = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with modes_kept(net):
        ...     _ = net.eval()
        >>> [module.training for module in net]
        [True, False]
    """
    modes = [(module, module.training) for module in net.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def removed_after(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of a ``with`` block.

    Example:
        >>> with removed_after([(relu := nn.ReLU()).register_forward_hook(lambda module, args, output: output + 1)]):
        ...     print(relu(Tensor([0.0])))
        tensor([1.])
        >>> relu(Tensor([0.0]))
        tensor([0.])
    """
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


@contextmanager
def after_each_call(of: dict[str, Callable[..., None]], net: nn.Module) -> Iterator[None]:
    """Inside a ``with`` block, call a function after each call of a named module.

    Example:
        >>> def show(module, args, output):
        ...     print(output.shape)
        >>> net = nn.Sequential(nn.ReLU())
        >>> with after_each_call({"0": show}, net):
        ...     _ = net(Tensor([1.0, 2.0]))
        torch.Size([2])
    """
    with removed_after(net.get_submodule(name).register_forward_hook(hook) for name, hook in of.items()):
        yield


@contextmanager
def caught_inputs(modules: list[nn.Module], caught: list[Tensor]) -> Iterator[None]:
    """Inside a ``with`` block, append the first argument of each call of ``modules`` to ``caught``, in their order.

    A module that stands in several places is one module, called several times.

    Example:
        >>> layer, caught = nn.Linear(2, 2), []
        >>> with caught_inputs([layer], caught):
        ...     _ = layer(Tensor([[1.0, 1.0]]))
        >>> caught
        [tensor([[1., 1.]])]
    """
    each = dict.fromkeys(modules)
    with removed_after(m.register_forward_pre_hook(lambda module, args: caught.append(args[0])) for m in each):
        yield


@contextmanager
def changed_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside a ``with`` block, apply ``change`` to the output of ``module``.

    Example:
        >>> with changed_output(relu := nn.ReLU(), lambda x: x + 1):
        ...     relu(Tensor([0.0]))
        tensor([1.])
    """
    with removed_after([module.register_forward_hook(lambda module, args, output: change(output))]):
        yield
