"""Any network that maps images to class scores: its layers, features and attention, found by one forward pass."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError, one_line
from vitlab.interface import logits_of
from vitlab.layers.resample import Grid
from vitlab.models.hooks import after_each_call, removed_after

MOST_CELLS = 14  # a side of the grids that analyses see; larger feature maps are averaged to it
MOST_PREFIX = 8  # class and register tokens before the patches
LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Layer(NamedTuple):
    """A named layer and what it returns for one image.

    Example:
        >>> Layer("layer1", "BasicBlock", (64, 56, 56), (56, 56)).seen
        (14, 14)

    Args:
        name: Name of the module.
        kind: Its class.
        shape: Shape of its output, without the batch.
        grid: Rows and columns of its tokens; None if they have no places.
        num_prefix_tokens: Tokens before the patches, such as a class token.
        channels_last: Whether a feature map is (h, w, C) and not (C, h, w).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    grid: Grid | None
    num_prefix_tokens: int = 0
    channels_last: bool = False

    @property
    def seen(self) -> Grid | None:
        """The grid after large feature maps are averaged."""
        if self.grid is None or len(self.shape) == 2:
            return self.grid
        return min(self.grid[0], MOST_CELLS), min(self.grid[1], MOST_CELLS)

    @property
    def has_cells(self) -> bool:
        """Whether its tokens have several places."""
        return self.grid is not None and math.prod(self.grid) > 1

    def as_map(self, x: Tensor) -> Tensor:
        """Map what the layer returns, for B images, to ``(B, C, h, w)``, without prefix tokens.

        Example:
            >>> Layer("blocks.0", "Block", (5, 8), (2, 2), num_prefix_tokens=1).as_map(torch.zeros(3, 5, 8)).shape
            torch.Size([3, 8, 2, 2])
        """
        if x.ndim == 4:
            return x.movedim(-1, 1) if self.channels_last else x
        assert self.grid is not None
        return x[:, self.num_prefix_tokens :].transpose(1, 2).unflatten(2, self.grid)


class AnyNetwork(nn.Module):
    """What analyses need of a network that is not a :class:`VisionTransformer`: a ResNet, Swin, or one of your own.

    It needs ``forward``, from ``(B, C, H, W)`` images to ``(B, K)`` class scores; an object with ``logits``, as Hugging
    Face returns it, counts. One forward pass finds the rest: the layers (blocks of one kind in a row; else all
    convolutions and linear layers), the linear layer that ends the network, and attention whose weights can be read.

    Args:
        net: The network; is set to evaluation mode.
        name: What it is called in messages.
        img_size: Height and width of its images, (H, W).
        in_chans: Channels C of its images.

    Raises:
        UsageError: It cannot be analyzed: it has no ``forward``, returns something else, or refuses such images.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, 10))
        >>> asked = AnyNetwork(net, "mine", img_size=(16, 16), in_chans=3)
        >>> asked(torch.zeros(2, 3, 16, 16)).shape, asked.features(torch.zeros(2, 3, 16, 16)).shape
        (torch.Size([2, 10]), torch.Size([2, 128]))
        >>> [(layer.name, layer.shape, layer.grid) for layer in asked.layers]
        [('0', (8, 4, 4), (4, 4))]
        >>> [tuple(tokens.shape) for tokens in asked.tokens(torch.zeros(2, 3, 16, 16))]  # before and after it
        [(2, 196, 3), (2, 16, 8)]
    """

    pos_embed_resize: Any = None  # nothing to resize

    predicts_labels = False  # whether each output is a label for itself, and not a class among others

    def __init__(self, net: nn.Module, name: str, img_size: tuple[int, int], in_chans: int) -> None:
        super().__init__()
        if type(net).forward is nn.Module.forward:
            raise UsageError(f"{name} cannot be analyzed: its class {type(net).__name__} has no `forward`")
        self.net, self.name, self.img_size, self.in_chans = net.eval(), name, img_size, in_chans
        self._explore()

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` images to ``(B, K)`` class scores."""
        return self._scores(self.net(images))

    def _scores(self, found: Any) -> Tensor:
        found = logits_of(found)
        if not isinstance(found, Tensor) or found.ndim != 2:
            what = f"a tensor of {found.ndim} dimensions" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            if found is None:
                what = "no `logits`: take the class that ends in a classifier"
            raise UsageError(f"{self.name} must return class scores, a tensor (B, K) or `logits`, and returns {what}")
        return found

    def takes(self, img_size: tuple[int, int]) -> bool:
        """Return whether the network takes images of this height and width."""
        try:
            with torch.no_grad():
                self(self._noise(1, img_size))
        except Exception:  # whatever a foreign network raises
            return False
        return True

    def features(self, images: Tensor) -> Tensor:
        """Map images to the ``(B, D)`` features that the last linear layer reads, or that timm calls ``pre_logits``."""
        theirs: Any = self.net
        if self.head is None and hasattr(theirs, "forward_head") and hasattr(theirs, "forward_features"):
            return theirs.forward_head(theirs.forward_features(images), pre_logits=True)
        if self.head is None:
            raise UsageError(f"this needs the features before a linear head, and {self.name} does not end in one")
        found: list[Tensor] = []
        with removed_after([self.head.register_forward_pre_hook(lambda module, args: found.append(args[0]))]):
            self(images)
        return found[-1].flatten(1)

    @torch.no_grad()
    def tokens(self, images: Tensor) -> list[Tensor]:
        """Return the ``(B, n, D)`` tokens that enter the first layer, then those that leave each one.

        Feature maps of more than 14 cells a side are averaged to 14.
        """
        return [_tokens(x, stage) for x, stage in zip(self.returned(images)[1], self.stages, strict=True)]

    def returned(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the ``(B, K)`` scores, and in their graph what enters the first layer and what leaves each one."""
        if not self.layers:
            raise UsageError(f"this needs layers whose outputs can be read, and {self.name} has none")
        entry: list[Tensor] = []
        found: dict[str, Tensor] = {}
        hooks = [
            module.register_forward_hook(lambda module, args, output, name=layer.name: found.update({name: output}))
            for layer, module in zip(self.layers, self.blocks, strict=True)
        ]
        hooks.append(self.blocks[0].register_forward_pre_hook(lambda module, args: entry.extend(args[:1])))
        with removed_after(hooks):
            scores = self(images)
        return scores, [*entry[: len(self.stages) - len(self.layers)], *(first(found[x.name]) for x in self.layers)]

    @torch.no_grad()
    def attention(self, images: Tensor) -> list[Tensor]:
        """Return the attention of each layer that has weights over all tokens, ``(B, A, L, L)`` each."""
        return [maps for maps in self._attended(images)[1] if self._is_attention(maps)]

    def graded_attention(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the ``(B, K)`` scores, and in their graph the attention of each layer as :meth:`attention` does."""
        scores, maps = self._attended(images)
        return self._scores(scores), [each for each in maps if self._is_attention(each)]

    @cached_property
    def reads(self) -> Literal["token", "patches"] | None:
        """Whether the scores come from the first token alone or from the patches alone.

        None if from others, such as a class and a distillation token, or if not every layer shows its weights.
        """
        with torch.enable_grad():
            try:
                scores, maps = self.graded_attention(self._noise(1).requires_grad_())
            except UsageError:
                return None
            if not maps or len(maps) != len(self.layers) or len({each.shape[-1] for each in maps}) > 1:
                return None
            weights = torch.linspace(1, 2, scores.shape[1]).to(scores)  # the plain sum of probabilities is always 1
            slopes = gradients_of((scores * weights).sum(), maps)
        if any(each is None for each in slopes):
            return None
        rows = slopes[-1].abs().sum(dim=(0, 1, 3))  # type: ignore[union-attr]  # of the tokens of the last layer, (L,)
        read = rows.nonzero().flatten().tolist()
        if self.num_prefix_tokens and {*read} <= {0}:
            return "token"
        return "patches" if all(row >= self.num_prefix_tokens for row in read) else None

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers' modules."""
        return [self.net.get_submodule(layer.name) for layer in self.layers]

    @property
    def head(self) -> nn.Module | None:
        """The linear layer whose outputs are the network's; None if it ends otherwise."""
        return None if self.head_name is None else self.net.get_submodule(self.head_name)

    @property
    def norm(self) -> nn.Module:
        """Nothing: what normalizes before the head is not known."""
        return nn.Identity()

    def _noise(self, count: int, img_size: tuple[int, int] | None = None) -> Tensor:
        value = next((v for v in (*self.parameters(), *self.buffers()) if v.is_floating_point()), torch.zeros(()))
        shape = (count, self.in_chans, *(img_size or self.img_size))
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(value)

    @torch.no_grad()
    def _explore(self) -> None:
        """Find layers, head, grid and attention."""
        calls: dict[str, list[Layer]] = {}  # of each module; and what enters it
        entries: dict[str, Layer] = {}
        last: list[tuple[str, Tensor]] = []

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                calls.setdefault(name, []).append(self._describe(name, module, first(output)))
                if args and isinstance(args[0], Tensor):
                    entries[name] = self._describe(name, module, args[0])
                if isinstance(module, nn.Linear):
                    last[:] = [(name, output)]

            return hook

        images = self._noise(2)
        with after_each_call({name: note(name) for name, _ in self.net.named_modules() if name}, self.net):
            scores = self._scores(self._run(images))
        self.num_classes = scores.shape[1]
        ended = last and last[0][1].shape == scores.shape and torch.equal(last[0][1], scores)
        self.head_name = last[0][0] if ended else None
        once = {name: seen[0] for name, seen in calls.items() if len(seen) == 1 and seen[0].shape}
        rows = [name for name in repeated(self.net) if name in once]
        if not rows:
            kinds = (nn.Linear, nn.Conv2d)
            rows = [name for name in once if isinstance(self.net.get_submodule(name), kinds) and name != self.head_name]
        order = {name: i for i, name in enumerate(once)}
        self.layers = [once[name] for name in sorted(rows, key=order.__getitem__)]
        start = [entries[x.name]._replace(name="input") for x in self.layers[:1] if x.name in entries]
        self.stages = [*[each for each in start if each.shape], *self.layers]
        self._choose_grid()
        depth = [maps for maps in self._attended(images[:1])[1] if self._is_attention(maps)]
        self.unseen = self._unseen(images[:1]) if depth else []
        self.attention_heads = [] if self.unseen else [maps.shape[1] for maps in depth]
        seen = max((x.num_prefix_tokens for x in self.layers if x.grid == self.grid_size), default=0)
        self.num_prefix_tokens = depth[0].shape[-1] - math.prod(self.grid_size) if depth else seen
        has_one = getattr(self.net, "cls_token", True) is not None  # by timm's name; without, the others are registers
        self.cls_token = True if self.num_prefix_tokens and has_one else None

    def _run(self, images: Tensor) -> Any:
        try:
            return self.net(images)
        except Exception as error:  # whatever a foreign network raises
            size = f"{self.in_chans} x {self.img_size[0]} x {self.img_size[1]}"
            raise UsageError(
                f"{self.name} does not take images of {size} ({one_line(error)}): give a transform, or --img_size, "
                "that makes images of its size"
            ) from error

    def _choose_grid(self) -> None:
        """Take the grid that most layers' tokens share, else squares that divide the image, 14 a side at most."""
        H, W = self.img_size
        grids = Counter(layer.grid for layer in self.layers if len(layer.shape) == 2)
        grid, count = grids.most_common(1)[0] if grids else (None, 0)
        shared = grid if 2 * count > len(self.layers) else None
        sides = (p for p in range(2, min(H, W) // 2 + 1) if not (H % p or W % p) and max(H, W) // p <= MOST_CELLS)
        side = next(sides, None)
        if side is None:  # nothing divides it: the cells differ by a pixel
            side = max(2, -(-max(H, W) // MOST_CELLS))
        self.grid_size: Grid = shared or (max(1, H // side), max(1, W // side))

    def _describe(self, name: str, module: nn.Module, x: Any) -> Layer:
        """Return what a layer's output ``x`` for two images is; without a shape if it is none for each image."""
        kind = type(module).__name__
        if not isinstance(x, Tensor) or x.ndim not in (2, 3, 4) or len(x) != 2 or not x.is_floating_point():
            return Layer(name, kind, (), None)
        shape, (H, W) = tuple(x.shape[1:]), self.img_size
        if x.ndim == 4:
            off = [abs(math.log(h * W / (w * H))) for h, w in (shape[1:], shape[:2])]
            grid = shape[:2] if (is_last := off[1] < off[0]) else shape[1:]
            return Layer(name, kind, shape, (grid[0], grid[1]), channels_last=is_last)
        if x.ndim == 3:
            for prefix in range(min(MOST_PREFIX + 1, shape[0])):
                h = math.isqrt((shape[0] - prefix) * H // W)
                if h and h * h * W == (shape[0] - prefix) * H:
                    return Layer(name, kind, shape, (h, (shape[0] - prefix) // h), prefix)
        return Layer(name, kind, shape, None)

    def _is_attention(self, maps: Tensor) -> bool:
        """Return whether these are weights of all tokens for all tokens: square, not negative, with a sum of 1."""
        cells = math.prod(self.grid_size)
        if maps.ndim != 4 or maps.shape[2] != maps.shape[3] or not 0 <= maps.shape[3] - cells <= MOST_PREFIX:
            return False
        return bool((maps >= 0).all() and ((maps.sum(dim=-1) - 1).abs() < 1e-3).all())

    def _unseen(self, images: Tensor) -> list[str]:
        """Return the layers that show no weights of attention, while others of their class do."""
        places: list[list[int]] = [[] for _ in self.layers]  # in the list of all weights, before and after each layer
        with eager_attention(self.net) as (caught, _), ExitStack() as stack:
            for module, own in zip(self.blocks, places, strict=True):
                for register in (module.register_forward_pre_hook, module.register_forward_hook):
                    stack.callback(register(lambda *_, own=own: own.append(len(caught))).remove)
            self.net(images)
        inside = [caught[own[0] : own[-1]] if own else [] for own in places]
        shown = [any(isinstance(x, Tensor) and self._is_attention(x) for x in maps) for maps in inside]
        kinds = {layer.kind for layer, shows in zip(self.layers, shown, strict=True) if shows}
        return [x.name for x, shows in zip(self.layers, shown, strict=True) if x.kind in kinds and not shows]

    def _attended(self, images: Tensor) -> tuple[Any, list[Tensor]]:
        """Return what the network returns, None if it does not run in this way, and weights of attention.

        These are whatever timm's attention, PyTorch's and Hugging Face's give, in the order of their use.
        """
        with eager_attention(self.net) as (caught, arguments):
            try:
                found = self.net(images, **arguments)
            except Exception:  # whatever a foreign network raises
                return None, []
        caught += getattr(found, "attentions", None) or ()
        caught = [each for each in caught if isinstance(each, Tensor)]
        return found, [each for each in caught if each.ndim == 4 and len(each) == len(images)]


def gradients_of(score: Tensor, maps: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of a score by weights of attention; None where they were not used.

    ``nn.MultiheadAttention`` returns a view of the weights that it used, so the gradient is that of the viewed ones.

    Example:
        >>> used = torch.ones(2, 2, requires_grad=True) * 3
        >>> [each if each is None else each.tolist() for each in gradients_of(used.sum(), [used.view(4), used * 1])]
        [[1.0, 1.0, 1.0, 1.0], None]
    """
    used = [each if each._base is None else each._base for each in maps]
    found = torch.autograd.grad(score, used, allow_unused=True)
    return [None if slope is None else slope.view_as(each) for slope, each in zip(found, maps, strict=True)]


def first(output: Any) -> Any:
    """Return the first of several outputs, or the only one.

    Example:
        >>> first((1, 2)), first(3)
        (1, 3)
    """
    return output[0] if isinstance(output, tuple | list) and output else output


def repeated(net: nn.Module, prefix: str = "") -> list[str]:
    """Return the names of a network's blocks: modules of one class that make half of a list or more.

    Where blocks hold such lists themselves, as the stages of ConvNeXt do, these count.

    Example:
        >>> block = lambda: nn.TransformerEncoderLayer(8, 2)
        >>> repeated(nn.ModuleDict({"stem": nn.Linear(1, 8), "blocks": nn.ModuleList([block(), block()])}))
        ['blocks.0', 'blocks.1']
    """
    found = []
    for name, child in net.named_children():
        kinds = Counter(type(part) for part in child.children() if any(part.children()) and not isinstance(part, LISTS))
        kind, count = kinds.most_common(1)[0] if kinds and isinstance(child, LISTS) else (None, 0)
        if 2 * count < len(list(child.children())) or not count:
            found += repeated(child, f"{prefix}{name}.")
            continue
        for number, part in child.named_children():
            if type(part) is kind:
                path = f"{prefix}{name}.{number}"
                found += repeated(part, f"{path}.") or [path]
    return found


@contextmanager
def eager_attention(net: nn.Module) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
    """Inside a ``with`` block, let attention compute its weights; yield a list that fills, and arguments of `forward`.

    Attention of timm (``attn_drop`` gets the weights unless ``fused_attn``), ``nn.MultiheadAttention``, and networks of
    Hugging Face (``output_attentions``).

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with torch.no_grad(), eager_attention(layer) as (caught, _):
        ...     _ = layer(torch.zeros(1, 5, 8))
        >>> [tuple(weights.shape) for weights in caught]
        [(1, 2, 5, 5)]
    """
    caught: list[Tensor] = []
    undo: list[Callable[[], Any]] = []
    arguments: dict[str, Any] = {}
    heard: set[nn.Module] = set()  # several layers may share a dropout, which tells of each use itself
    for module in net.modules():
        layer: Any = module
        if isinstance(getattr(layer, "attn_drop", None), nn.Module):
            if getattr(layer, "fused_attn", False):
                undo.append(partial(setattr, layer, "fused_attn", True))
                layer.fused_attn = False
            if layer.attn_drop not in heard:
                heard.add(layer.attn_drop)
                undo.append(layer.attn_drop.register_forward_pre_hook(lambda m, args: caught.append(args[0])).remove)
        elif isinstance(layer, nn.MultiheadAttention):
            asked = {"need_weights": True, "average_attn_weights": False}
            before = layer.register_forward_pre_hook(lambda m, args, kw, a=asked: (args, {**kw, **a}), with_kwargs=True)
            after = layer.register_forward_hook(lambda m, args, output: caught.append(output[1]))
            undo += [before.remove, after.remove]
    theirs: Any = net
    if callable(getattr(theirs, "set_attn_implementation", None)):  # of Hugging Face
        usual = getattr(theirs.config, "_attn_implementation", None)
        theirs.set_attn_implementation("eager")
        arguments["output_attentions"] = True
        undo.append(lambda: theirs.set_attn_implementation(usual or "eager"))
    try:
        yield caught, arguments
    finally:
        for each in undo:
            each()


def _tokens(x: Tensor, layer: Layer) -> Tensor:
    """Map a layer's output to ``(B, n, D)``, feature maps of many cells averaged."""
    if x.ndim == 2:
        return x[:, None]
    if x.ndim == 3:
        return x
    x = x.movedim(-1, 1) if layer.channels_last else x  # (B, C, h, w)
    size = [min(side, MOST_CELLS) for side in x.shape[2:]]
    return F.adaptive_avg_pool2d(x, (size[0], size[1])).flatten(2).transpose(1, 2)
