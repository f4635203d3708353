"""The formats of `vitlab export`: how to write a network in each, and how to read it back."""

import importlib.util
import inspect
import io
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitlab.class_paths import choice_text, name_and_args
from vitlab.errors import RunFailed, UsageError, named_line
from vitlab.interface import as_outputs
from vitlab.jobs.exported import Form
from vitlab.jobs.graph_sizes import Side, check_images, sizes_to_check
from vitlab.layers.mlp import ActName
from vitlab.layers.norm import NormName
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.layers.pos_embed.rotary import RoPE2d
from vitlab.models.convert import to_timm, weights_for_timm
from vitlab.models.load import load_network, network_args
from vitlab.models.old_names import DEFAULTS, OLD
from vitlab.models.vit import VisionTransformer
from vitlab.models.weights_file import weights_digest
from vitlab.objects import given_to
from vitlab.shipped import card_beside

Arguments = dict[str, Any]  # of VisionTransformer
Outputs = Callable[[Tensor], Tensor]
_HUGE = 1.5e9  # bytes; an ONNX file holds 2 GB at most, with larger weights in a file beside it
_TIMM_NAMES = (  # arguments of the same name and meaning
    *("img_size", "in_chans", "num_classes", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias"),
    *("qk_norm", "class_token", "reg_tokens", "global_pool", "act_layer", "pre_norm"),
)


class Plain(nn.Module):
    """A network of the user's own as the formats need it: it knows the size of its images and returns a tensor.

    Args:
        net: The network; maps ``(B, C, H, W)`` to ``(B, K)``.
        in_chans: Number of channels C.
        img_size: Height and width.

    Example:
        >>> Plain(nn.Flatten(), 1, (2, 2))(torch.zeros(3, 1, 2, 2)).shape
        torch.Size([3, 4])
    """

    def __init__(self, net: nn.Module, in_chans: int, img_size: tuple[int, int]) -> None:
        super().__init__()
        self.net, self.in_chans, self.img_size = net, in_chans, img_size
        self.eval()
        with torch.no_grad():
            self(torch.zeros(1, in_chans, *img_size))

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` images to outputs."""
        return as_outputs(self.net(images), self.net)


def network_arguments(net: VisionTransformer) -> Arguments:
    """Return all constructor arguments of ``net``, from those that it was built with."""
    parameters, given = inspect.signature(VisionTransformer).parameters.values(), network_args(given_to(net))
    arguments = {p.name: given.get(p.name, p.default) for p in parameters}
    num_classes = 0 if isinstance(net.head, nn.Identity) else _outputs_of(net)
    plain = {"img_size": list(net.img_size), "in_chans": net.in_chans, "num_classes": num_classes}
    return json.loads(json.dumps({**arguments, **plain}))


def _outputs_of(net: VisionTransformer) -> int:
    with torch.no_grad():
        return int(net(torch.zeros(1, net.in_chans, *net.img_size)).shape[1])


def _dynamic_shapes(sides: list[Side] | None) -> tuple[dict[int, Any]]:
    shapes: dict[int, Any] = {0: torch.export.Dim("batch")}
    for axis, name, side in zip((2, 3), ("rows", "columns"), sides or [], strict=False):
        step = side.multiple_of
        count = torch.export.Dim(name, min=side.least // step, max=side.most // step)
        shapes[axis] = count if step == 1 else step * count
    return (shapes,)


def both_outputs(
    net: VisionTransformer | Plain, exported: Outputs, sides: list[Side] | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of both for random images, in batches of 1 and of 5.

    Args:
        net: The network.
        exported: What computes the same.
        sides: Heights and widths that it leaves open; None if it takes images of the trained size alone.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for count, size in product((1, 5), sizes_to_check(net, sides)):
        images = torch.randn(count, net.in_chans, *size, generator=generator)
        with torch.no_grad():
            ours = net(images)
            try:
                found.append((ours, exported(images)))
            except Exception as error:  # onnxruntime's have no class in common
                what = f"a batch of {count} images of {size[0]} x {size[1]} pixels"
                raise RunFailed(f"the file fails on {what}; nothing was written: {named_line(error, 200)}") from error
    return found


def largest_difference(pairs: Sequence[tuple[Tensor, Tensor]], unit: Tensor | float = 1.0, steps: int = 0) -> float:
    """Return the largest difference of outputs; NaN if one is NaN.

    Args:
        pairs: Outputs ``(B, K)`` of both.
        unit: In what to measure it, for all outputs or for each of the K.
        steps: Of float32 at the size of an output, which do not count.

    Example:
        >>> large = torch.tensor([[300_000.0, 0.5]])
        >>> pair = large, large + torch.tensor([[0.0625, 0.0]])
        >>> largest_difference([pair]), largest_difference([pair], steps=4)
        (0.0625, 0.0)
    """
    step = steps * torch.finfo(torch.float32).eps
    differences = [((b - a).abs() - step * a.abs()).clamp(min=0) / unit for a, b in pairs]
    return float(torch.stack([one.max() for one in differences]).max())


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a state dict, of which those that share memory, as tied parameters do, have their own."""
    tensors = ((name, value) for name, value in state.items() if isinstance(value, Tensor))
    return {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in tensors}


def _write_safetensors(net: VisionTransformer, network: Arguments, path: Path) -> dict[str, str]:
    state = _apart(net.state_dict())
    arguments = json.dumps(network)
    digest = weights_digest(state, arguments)
    save_file(state, path, metadata={"format": "pt", "hyper_parameters": arguments, "sha256": digest})
    return {}


def _read_safetensors(path: Path, network: Arguments) -> Outputs:
    return load_network(path)


def _write_timm(net: VisionTransformer, network: Arguments, path: Path) -> dict[str, str]:
    kind, arguments = _timm_network(network)
    try:
        if kind == "VisionTransformer":
            state, table = net.state_dict(), None
            if isinstance(net.pos_embed, AddedPosEmbed):
                # timm stores what is added, whatever it is computed from
                state = {name: value for name, value in state.items() if not name.startswith("pos_embed.")}
                table = net.pos_embed.for_batch().added().detach()
            state = to_timm(state, table)
        else:
            state = weights_for_timm(net, _built_by_timm(kind, arguments))
    except ValueError as error:
        raise UsageError(f"{error}; use --to safetensors, onnx or pt2") from error
    save_file(_apart(state), path, {"format": "pt"})
    norm = arguments.pop("norm_layer")
    code = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    code += f", norm_layer=partial(torch.nn.{norm.func.__name__}, eps={norm.keywords['eps']:g})"
    return {"timm": f"timm.models.{kind}({code})"}


def _read_timm(path: Path, network: Arguments) -> Outputs:
    model = _built_by_timm(*_timm_network(network)).eval()
    model.load_state_dict(load_file(path))
    return model


def _built_by_timm(kind: str, arguments: dict[str, Any]) -> nn.Module:
    import timm.models

    model: nn.Module = getattr(timm.models, kind)(**arguments)
    return model


def _timm_network(network: Arguments) -> tuple[str, dict[str, Any]]:
    """Return the class of timm that computes what a network does, and its arguments, or refuse the network.

    Rotations are in timm's Eva, trained biases by displacement in its Beit, all else that it has in VisionTransformer.
    """
    network = {name: _bare(choice) for name, choice in network.items()}
    value = network["pos_embed"]
    parts = dict(name_and_args("pos_embed", part) for part in (value if isinstance(value, list) else [value]))
    words = [word for word in parts if word in ("rope2d", "rope_mixed", "relpos")]
    if len(words) != 1 or set(parts) - {*words, "learned"}:
        return "VisionTransformer", _timm_arguments(network)
    options = parts.pop(words[0])
    kind, swiglu = "Beit" if words[0] == "relpos" else "Eva", network["mlp_layer"] == "swiglu"
    fewer: dict[str, tuple[Any, ...]] = {"mlp_layer": ("mlp", "swiglu"), "act_layer": ("silu" if swiglu else "gelu",)}
    if kind == "Beit":
        fewer |= {"class_token": (True,), "reg_tokens": (0,), "pre_norm": (False,), "qk_norm": (False,)}
        fewer["global_pool"] = ("avg", "token")
    table = {"class_path": "learned", "init_args": parts["learned"]} if parts else "none"
    common = _timm_arguments(network | {"pos_embed": table}, kind, fewer)
    common |= {"use_fc_norm": common.pop("fc_norm"), "swiglu_mlp": swiglu, "use_abs_pos_emb": bool(parts)}
    tokens = {"num_reg_tokens": common.pop("reg_tokens"), "use_pre_transformer_norm": common.pop("pre_norm")}
    dropped = ("act_layer", "pos_embed", *(("class_token", "qk_norm") if kind == "Beit" else ()))
    common = {name: given for name, given in common.items() if name not in dropped}
    if kind == "Beit":
        shared = options.get("join") == "every_layer_shared"
        return kind, common | {"use_rel_pos_bias": not shared, "use_shared_rel_pos_bias": shared}
    return kind, common | tokens | {"attn_type": "rope", "no_embed_class": True} | _timm_rotation(words[0], options)


def _bare(value: Any) -> Any:
    """Return the word of a ``class_path`` without arguments; anything else unchanged."""
    is_bare = isinstance(value, Mapping) and "class_path" in value and not value.get("init_args")
    return value["class_path"] if is_bare else value


def _timm_rotation(word: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of timm's Eva for a rotation, or refuse one that it does not have."""
    joins = (None, "every_layer") if word == "rope_mixed" else (None, "every_layer_shared")
    if options.get("join") not in joins or options.get("register_theta") is not None:
        choice = choice_text({"class_path": word, "init_args": dict(options)})
        raise UsageError(f"timm's Eva does not have `pos_embed: {choice}`; use --to safetensors, onnx or pt2")
    rotation: dict[str, Any] = {"use_rot_pos_emb": True}
    if word == "rope_mixed":
        return rotation | {"rope_type": "mixed", "rope_grid_indexing": "xy"}
    defaults = inspect.signature(RoPE2d).parameters
    given = {name: defaults[name].default for name in ("theta", "shift", "jitter", "rescale")}
    given |= {name: value for name, value in options.items() if value is not None}
    rotation |= {"rope_temperature": given["theta"], "rope_rotate_half": given.get("pairs") == "half"}
    rotation["rope_grid_indexing"] = "ij" if given.get("axes") == "yx" else "xy"
    if given.get("coordinates") != "normalized":
        return rotation | {"rope_type": "cat"}
    moves = {f"rope_{name}_coords": given[name] for name in ("shift", "jitter", "rescale")}
    nothing = {"rope_shift_coords": 0.0, "rope_jitter_coords": 1.0, "rope_rescale_coords": 1.0}
    return rotation | {"rope_type": "dinov3", **{n: v for n, v in moves.items() if v != nothing[n]}}


def _timm_arguments(
    network: Arguments, kind: str = "VisionTransformer", fewer: Mapping[str, tuple[Any, ...]] | None = None
) -> dict[str, Any]:
    """Return the arguments of timm's ``kind`` for a network, or refuse one that it cannot build.

    They are those of its VisionTransformer; ``fewer`` are the values that another class takes, by argument.
    """
    possible = {
        "tokenizer": ("patch",),
        "pos_embed": ("none", "learned", "factorized", "sincos1d", "sincos2d"),
        "join": (None, "stem"),
        "block": ("plain",),
        "attn": ("softmax",),
        "qk_scale": (None, (network["embed_dim"] / network["num_heads"]) ** -0.5),
        "head_hidden": (0,),
        **{name: (OLD[name].default,) for name in ("value_skip", "se_reduction", "ghost", "attn_gate")},
        "flexi_patch": (None,),
        "mlp_layer": ("mlp",),
        "act_layer": get_args(ActName),
        "norm_layer": get_args(NormName),
        **(fewer or {}),
    }
    flat = {name: OLD[name].default for name in OLD} | {"join": None} | network
    for part in DEFAULTS:
        if not isinstance(network[part], list):
            flat[part], options = name_and_args(part, network[part])
            flat |= options
    part_of = {old.name: old.part for old in OLD.values()}  # an option is shown with its part
    others = [part_of.get(name, name) for name, values in possible.items() if flat[name] not in values]
    if unsupported := [f"`{name}: {choice_text(network[name])}`" for name in dict.fromkeys(others)]:
        raise UsageError(f"timm's {kind} does not have {' and '.join(unsupported)}; use --to safetensors, onnx or pt2")
    norm = torch.nn.LayerNorm if network["norm_layer"] == "layernorm" else torch.nn.RMSNorm
    return {
        **{name: flat[name] for name in _TIMM_NAMES},
        "pos_embed": "none" if flat["pos_embed"] == "none" else "learn",
        "init_values": network["layer_scale"],
        "fc_norm": network["fc_norm"],
        "norm_layer": partial(norm, eps=network["norm_eps"]),
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Print nothing of the graphs that torch shows when it fails: its error says what failed."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def _write_onnx(
    net: VisionTransformer | Plain,
    network: Arguments,
    path: Path,
    sides: list[Side] | None = None,
    opset: int | None = None,
) -> dict[str, str]:
    try:
        # ONNX is made of the steps of this kernel, and others give them other strides
        with _quiet(), sdpa_kernel(SDPBackend.MATH):
            torch.onnx.export(
                net,
                (_example(net, sides),),
                path,
                input_names=["images"],
                output_names=["outputs"],
                dynamo=True,
                dynamic_shapes=_dynamic_shapes(sides),
                opset_version=opset,
                external_data=sum(value.nbytes for value in chain(net.parameters(), net.buffers())) > _HUGE,
                optimize=False,  # onnxscript drops the performer's 1e-8 as if it were 0; runtimes optimize on loading
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        operator = re.search(r"No ONNX function found for <OpOverload\(op='\w+\.(\w+)'", str(error))
        if operator is None:
            raise
        raise UsageError(f"ONNX has no {operator[1]}: use --to pt2") from error
    return {}


def _read_onnx(path: Path, network: Arguments) -> Outputs:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()  # else as many as the machine has, not as we may use
    options.log_severity_level = 4  # it warns of each constant that it does not fold, and raises what it logs as error
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["outputs"], {"images": images.numpy()})[0])


def _write_pt2(
    net: VisionTransformer | Plain, network: Arguments, path: Path, sides: list[Side] | None = None
) -> dict[str, str]:
    with _quiet():
        program = torch.export.export(net, (_example(net, sides),), dynamic_shapes=_dynamic_shapes(sides))
    buffer = io.BytesIO()  # torch's own writer aborts the process when the disk is full
    torch.export.save(program, buffer)
    path.write_bytes(buffer.getbuffer())
    return {}


def _read_pt2(path: Path, network: Arguments) -> Outputs:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch 2.10 only reads it
        return torch.export.load(path).module()


def _example(net: VisionTransformer | Plain, sides: list[Side] | None) -> Tensor:
    size = sizes_to_check(net, sides)[-1]  # not the trained one, nor a square, which a graph might take for a rule
    return torch.zeros(2, net.in_chans, *size)  # a batch size of 1 would be fixed in the graph


FORMATS: dict[Form, tuple[Callable[..., dict[str, str]], Callable[[Path, Arguments], Outputs]]] = {
    "safetensors": (_write_safetensors, _read_safetensors),
    "timm": (_write_timm, _read_timm),
    "onnx": (_write_onnx, _read_onnx),
    "onnx-int8": (_write_onnx, _read_onnx),  # before it is quantized
    "pt2": (_write_pt2, _read_pt2),
}


def need_packages(what: str, *names: str) -> None:
    """Refuse ``what`` without packages of the extra ``export``.

    Example:
        >>> need_packages("`--to onnx`", "torch")
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}: pip install 'vitlab[export]'")


class Graph(nn.Module):
    """A graph of ``vitlab export --to onnx`` in onnxruntime, which says in one line which images it was made for.

    Args:
        path: The file; FILE.json beside it is its card.

    Raises:
        UsageError: When called with images that it was not made for.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        card = json.loads(card_beside(path).read_text())["images"]
        self.path, (_, self.in_chans, *size) = path, card["shape"]
        self.sides = [Side(**card[name]) for name in ("height", "width")] if "height" in card else None
        h, w = card.get("trained_at", size)
        self.img_size: tuple[int, int] = (h, w)
        self._outputs = _read_onnx(path, {})

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` images to ``(B, K)`` outputs."""
        check_images(tuple(images.shape), self.in_chans, self.img_size, self.sides, self.path)
        return self._outputs(images)
