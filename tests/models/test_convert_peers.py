"""ViTs of Hugging Face's transformers and of torchvision compute the same here, with random weights."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

import vitlab
from vitlab.cli.main import main
from vitlab.data import ImageFolder
from vitlab.errors import UsageError
from vitlab.jobs.subject_without_run import named_subject
from vitlab.jobs.terminal import open_terminal
from vitlab.jobs.train.initial import load_initial
from vitlab.jobs.view import View
from vitlab.models import create_model
from vitlab.models.convert_peers import hf_state, peer_file, peer_images, peer_outputs
from vitlab.models.load import load_weights
from vitlab.models.vit import VisionTransformer
from vitlab.runs.directory import RunDir
from vitlab.tasks import Classifier
from vitlab.tasks.distillation import read_teacher

SIZE = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
WIDE = SIZE | {"intermediate_size": 48, "image_size": (32, 48)}  # ViT and DeiT take other heights than widths
MLP = SIZE | {"intermediate_size": 48}
OF_TIMM = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 2,
    "num_classes": 2,
}
EQUAL = {
    "ViTModel": ("ViT", WIDE),
    "ViTForImageClassification": ("ViT", MLP | {"qkv_bias": False, "num_labels": 5}),
    "DeiTModel": ("DeiT", MLP),
    "DeiTForImageClassification": ("DeiT", WIDE | {"num_labels": 5, "hidden_act": "relu"}),
    "Dinov2Model": ("Dinov2", SIZE | {"use_swiglu_ffn": True}),
    "Dinov2WithRegistersModel": ("Dinov2WithRegisters", SIZE | {"num_register_tokens": 3}),
    "DINOv3ViTModel": ("DINOv3ViT", MLP | {"num_register_tokens": 4, "use_gated_mlp": True, "hidden_act": "silu"}),
    "SiglipVisionModel": ("SiglipVision", MLP | {"image_size": 36}),  # as 384 pixels in patches of 14
    "SiglipForImageClassification": ("Siglip", {"vision_config": MLP, "text_config": {}, "num_labels": 5}),
}


def random_net(name, config, more):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = dict(more)
    if name == "SiglipForImageClassification":
        options["text_config"] = {"hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 48}
        options["text_config"] |= {"num_attention_heads": 2, "vocab_size": 10}
    net = getattr(transformers, name)(getattr(transformers, f"{config}Config")(**options)).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return net


def assert_equal(theirs, name="hf:random"):
    file = peer_file(theirs, name)
    ours = VisionTransformer(**file.arguments).eval()
    load_weights(ours, file)
    images = torch.randn(2, 3, *ours.img_size, generator=torch.Generator().manual_seed(1))
    expected = peer_outputs(theirs, images)
    with torch.no_grad():
        outputs = ours(images)
    assert expected.std() > 0.05
    torch.testing.assert_close(outputs, expected, atol=1e-5 * float(expected.abs().max().clamp(min=1)), rtol=0)
    return ours


@pytest.mark.parametrize("name", EQUAL)
def test_a_vit_of_transformers_computes_the_same(name):
    assert_equal(random_net(name, *EQUAL[name]))


def test_a_vit_whose_patches_do_not_fill_its_images_is_compared_at_its_own_size(tmp_path):
    theirs = random_net("ViTForImageClassification", "ViT", MLP | {"image_size": 36})  # takes images of no other size
    theirs.save_pretrained(tmp_path)
    ours = create_model(f"hf:{tmp_path}").eval()
    assert ours.img_size == (32, 32)
    images = torch.randn(2, 3, 36, 36)
    with torch.no_grad():
        torch.testing.assert_close(ours(images[..., :32, :32]), theirs(images).logits, atol=1e-4, rtol=0)


def test_a_model_without_layer_biases_and_with_a_plain_mlp_computes_the_same():
    assert_equal(random_net("DINOv3ViTModel", "DINOv3ViT", MLP | {"proj_bias": False, "key_bias": True}))
    assert_equal(random_net("DINOv3ViTModel", "DINOv3ViT", MLP | {"query_bias": False, "value_bias": True}))
    assert_equal(random_net("Dinov2Model", "Dinov2", SIZE))


def test_the_names_of_files_before_version_5_are_read():
    theirs = random_net("ViTModel", "ViT", MLP)
    rest = {"attention.q_proj": "attention.attention.query", "attention.k_proj": "attention.attention.key"}
    rest |= {"attention.v_proj": "attention.attention.value", "attention.o_proj": "attention.output.dense"}
    rest |= {"mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense", "layers.": "encoder.layer."}
    old = {}
    for key, value in theirs.state_dict().items():
        for new, before in rest.items():
            key = key.replace(new, before)
        old[f"vit.{key}"] = value
    assert "vit.encoder.layer.1.attention.attention.query.bias" in old
    now, then = hf_state(theirs.state_dict()), hf_state(old)
    assert now.keys() == then.keys() and all(torch.equal(now[key], then[key]) for key in now)


@pytest.mark.parametrize(
    ("name", "config", "more", "reason"),
    [
        ("Dinov2ForImageClassification", "Dinov2", SIZE, "its head reads the class token and the mean of the patches"),
        ("DeiTForImageClassificationWithTeacher", "DeiT", MLP, "it has two heads"),
        ("SiglipVisionModel", "SiglipVision", MLP | {"vision_use_head": False}, "it has no head that pools"),
        ("ViTModel", "ViT", MLP | {"hidden_act": "tanh"}, "it has hidden_act=tanh"),
        ("ViTMAEModel", "ViTMAE", MLP, "ViTMAEModel has no counterpart here: ViTModel, .* have one"),
    ],
)
def test_a_model_without_a_counterpart_is_refused_by_name(name, config, more, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        peer_file(random_net(name, config, more), "hf:random")
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_folder_of_transformers_is_read_by_name_and_fine_tuned(tmp_path):
    theirs = random_net("ViTForImageClassification", "ViT", MLP | {"num_labels": 5})
    theirs.save_pretrained(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    net = create_model(f"hf:{tmp_path}").eval()
    torch.testing.assert_close(net(images), theirs(images).logits, atol=1e-5, rtol=0)
    new = create_model(f"hf:{tmp_path}", num_classes=7, img_size=48)
    assert new(torch.randn(2, 3, 48, 48)).shape == (2, 7)
    into = create_model("vit_ti16", weights=f"hf:{tmp_path}", **net_arguments()).eval()
    torch.testing.assert_close(into(images), theirs(images).logits, atol=1e-5, rtol=0)
    with pytest.raises(UsageError, match="one of transformers as hf:FOLDER"):
        vitlab.load(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no weights to give: .*") as refused:
        create_model(f"hf:{tmp_path}")
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"transformers has no configuration of hf:.*/none"):
        create_model(f"hf:{tmp_path}/none")


@pytest.mark.parametrize("name", ["ViTForImageClassification", "DINOv3ViTModel"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_folder_in_half_precision_is_read_in_float32(name, dtype, tmp_path):
    config, more = EQUAL[name]
    theirs = random_net(name, config, more).to(dtype)
    theirs.save_pretrained(tmp_path)
    net = create_model(f"hf:{tmp_path}").eval()
    images = torch.randn(2, 3, *net.img_size)
    expected = peer_outputs(type(theirs).from_pretrained(tmp_path, dtype=torch.float32), images)
    torch.testing.assert_close(net(images), expected, atol=1e-5 * float(expected.abs().max().clamp(min=1)), rtol=0)


@pytest.mark.parametrize(
    ("name", "config", "more", "reason"),
    [
        ("Dinov2ForImageClassification", "Dinov2", SIZE, "its head reads the class token and the mean of the patches"),
        ("DeiTForImageClassificationWithTeacher", "DeiT", MLP, "it has two heads"),
    ],
)
def test_a_head_without_a_counterpart_is_left_out_with_a_warning(name, config, more, reason, tmp_path):
    theirs = random_net(name, config, more | {"num_labels": 5})
    theirs.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=f"is read without its head, which has no counterpart here: {reason}"):
        net = create_model(f"hf:{tmp_path}").eval()
    images = torch.randn(2, 3, 32, 32)
    expected = peer_outputs(theirs.base_model, images)
    torch.testing.assert_close(net(images), expected, atol=1e-4, rtol=0)


HOW = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], "resample": 2}
PROCESSORS = {
    "ViTImageProcessor": {"size": {"height": 32, "width": 32}},
    "DeiTImageProcessor": {"size": {"height": 40, "width": 40}, "crop_size": {"height": 32, "width": 32}},
    "BitImageProcessor": {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_images_are_prepared_as_transformers_prepares_them(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    random_net("ViTForImageClassification", "ViT", MLP | {"num_labels": 5}).save_pretrained(tmp_path)
    processor = getattr(transformers, name)(**PROCESSORS[name], **HOW)
    processor.save_pretrained(tmp_path)
    loaded = vitlab.load(f"hf:{tmp_path}")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((61, 48), Image.Resampling.BICUBIC)
    theirs = processor(image, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(loaded.transform(image), theirs, atol=0.05, rtol=0)  # three of 255 steps
    for mode in ("L", "P", "RGBA"):
        other = image.convert(mode)
        assert torch.equal(loaded.transform(other), loaded.transform(other.convert("RGB")))


LEFT_OUT = {  # as published files leave keys out, or are of before
    "a filter": {"image_processor_type": "ViTImageProcessor", "size": 32},
    "a crop": {"image_processor_type": "DeiTImageProcessor", "size": 40, "crop_size": 32},
    "the shortest edge": {"image_processor_type": "BitImageProcessor", "size": 40, "crop_size": 32},
    "the class": {"size": {"height": 32, "width": 32}, "do_normalize": False},
    "values of 0 to 2": {"image_processor_type": "ViTImageProcessor", "size": 32, "rescale_factor": 1 / 127.5},
    "values of 0 to 255": {"image_processor_type": "ViTImageProcessor", "size": 32, "do_rescale": False},
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_a_preparation_leaves_out_is_as_in_its_class(case, tmp_path):
    transformers = pytest.importorskip("transformers")
    random_net("ViTForImageClassification", "ViT", MLP | {"num_labels": 5}).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(LEFT_OUT[case]))
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((61, 48), Image.Resampling.BICUBIC)
    theirs = processor(image, return_tensors="pt")["pixel_values"][0]
    step = 1 / 255 / peer_images(f"hf:{tmp_path}")["std"][0]
    torch.testing.assert_close(vitlab.load(f"hf:{tmp_path}").transform(image), theirs, atol=3 * step, rtol=0)


def test_a_preparation_without_a_counterpart_is_refused_in_one_line(tmp_path):
    random_net("ViTModel", "ViT", WIDE).save_pretrained(tmp_path)
    how = {"image_processor_type": "ViTImageProcessor", "size": {"shortest_edge": 32, "longest_edge": 64}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(how))
    with pytest.raises(ValueError, match=r"resizes images by .*64.*, which has no counterpart here: height"):
        peer_images(f"hf:{tmp_path}")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(how | {"size": {"height": 32, "width": 48}}))
    assert peer_images(f"hf:{tmp_path}")["input_size"] == (3, 32, 48)


def test_a_preparation_that_keeps_the_shape_of_images_gets_their_center_and_says_so(tmp_path):
    transformers = pytest.importorskip("transformers")
    random_net("ViTForImageClassification", "ViT", MLP | {"num_labels": 5}).save_pretrained(tmp_path)
    how = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 32}, "do_center_crop": False}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(how))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8))
    with pytest.warns(UserWarning, match=r"keeps the whole image, its shortest edge at 32 .*center of 32 x 32 is cut"):
        loaded = vitlab.load(f"hf:{tmp_path}")
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(loaded.transform(image), theirs[:, :, 8:-8], atol=0.05, rtol=0)


def test_values_are_normalized_as_stated_where_nothing_is_resized(tmp_path):
    random_net("ViTForImageClassification", "ViT", MLP | {"num_labels": 5}).save_pretrained(tmp_path)
    how = {"image_processor_type": "ViTImageProcessor", "size": {"height": 64, "width": 64}, "do_resize": False}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(how | HOW | {"resample": 4}))
    with pytest.warns(UserWarning, match=r"does not say how it resizes images: .* its network, 32 x 32 pixels"):
        transform = vitlab.load(f"hf:{tmp_path}").transform
    white = (1 - torch.tensor(HOW["image_mean"])) / torch.tensor(HOW["image_std"])
    torch.testing.assert_close(transform(Image.new("RGB", (40, 36), "white")).mean(dim=(1, 2)), white)


def test_another_size_of_prepared_images_than_the_networks_is_told(tmp_path, recwarn):
    random_net("Dinov2Model", "Dinov2", SIZE | {"image_size": 64}).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(LEFT_OUT["the shortest edge"]))
    assert create_model(f"hf:{tmp_path}", img_size=32).img_size == (32, 32) and not recwarn
    with pytest.warns(UserWarning, match=r"of 32 x 32 pixels .* built for 64 x 64, .*\(\.\.\., img_size=32\) takes"):
        assert create_model(f"hf:{tmp_path}").img_size == (64, 64)


def test_without_a_preparation_of_images_there_is_a_network_alone(tmp_path, capsys):
    random_net("ViTForImageClassification", "ViT", MLP | {"num_labels": 5}).save_pretrained(tmp_path)
    assert peer_images(f"hf:{tmp_path}") == {} and create_model(f"hf:{tmp_path}").num_classes == 5
    with pytest.raises(UsageError, match=r"does not say how its images are prepared: create_model\('hf:.*'\) builds"):
        vitlab.load(f"hf:{tmp_path}")
    open_terminal(quiet=False)
    named_subject(f"hf:{tmp_path}", View())
    assert f"hf:{tmp_path} does not define a normalization: using ImageNet's" in " ".join(
        capsys.readouterr().out.split()
    )


def test_an_unreadable_image_preparation_is_refused(tmp_path):
    random_net("ViTForImageClassification", "ViT", MLP | {"num_labels": 5}).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot be read: .*preprocessor_config\.json"):
        vitlab.load(f"hf:{tmp_path}")


@pytest.mark.slow
def test_a_network_of_another_library_is_fine_tuned_analyzed_and_used_as_a_teacher(here):
    transformers = pytest.importorskip("transformers")
    random_net("ViTForImageClassification", "ViT", MLP | {"num_labels": 5}).save_pretrained("theirs")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}, **HOW).save_pretrained("theirs")
    for i in range(12):
        (folder := here / "photos" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 36), (20 * i, 100, 50)).save(folder / f"{i}.png")
    arguments = [f"--model.{k}={v}" for k, v in net_arguments().items() if k != "img_size"]
    small = ["--data=ImageFolder", "--data.root=photos", "--data.img_size=32", "--data.batch_size=2"]
    small += ["--data.num_workers=0", "--trainer.max_epochs=1", "--trainer.logger=false", "--quiet"]
    config = str(Path(vitlab.__file__).parents[1] / "configs" / "vit.yaml")
    fit = ["fit", "--config", config, *arguments, "--model.global_pool=token", "--model.pos_embed=learned", *small]
    assert main([*fit, "--init_from=hf:theirs", "--name=tuned"]) == 0
    facts = RunDir("runs/tuned").data
    assert (facts["mean"], facts["statistics_from"]) == (HOW["image_mean"], "given")
    assert main(["analyze", "cost", "hf:theirs", "--images", "photos/a"]) == 0
    assert read_teacher("hf:theirs").mean == tuple(HOW["image_mean"])


@pytest.mark.slow
@pytest.mark.parametrize("library", ["hf", "timm"])
@pytest.mark.parametrize(("stated", "is_other"), [("ab", False), ("ba", True), (["LABEL_0", "LABEL_1"], False)])
def test_classes_that_a_library_states_are_compared_with_those_of_the_data(tmp_path, library, stated, is_other):
    if library == "hf":
        theirs = random_net("ViTForImageClassification", "ViT", MLP | {"id2label": dict(enumerate(stated))})
        theirs.save_pretrained(tmp_path)
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(LEFT_OUT["the shortest edge"]))
        source = f"hf:{tmp_path}"
    else:
        theirs = timm.create_model("vit_tiny_patch16_224", **OF_TIMM)
        save_for_hf(theirs, tmp_path, {"label_names": list(stated)}, OF_TIMM)
        source = f"timm:local-dir:{tmp_path}"
    for i in range(6):
        (folder := tmp_path / "photos" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (20 * i, 100, 50)).save(folder / f"{i}.png")
    arguments = ["--data=ImageFolder", f"--data.root={tmp_path}/photos", "--data.num_workers=0"]
    subject = named_subject(source, View(), arguments)
    assert not subject.is_elsewhere and (subject.class_names == ["b", "a"]) == is_other  # which it numbers anew
    data = ImageFolder(f"{tmp_path}/photos", img_size=32, num_workers=0)
    data.build("train")
    with pytest.raises(ValueError, match="of other names or order") if is_other else nullcontext():
        read_teacher(source).align_with_data(data)
    task = Classifier(
        **net_arguments() | {"norm_eps": 1e-6 if library == "timm" else 1e-12}, num_classes=2, pos_embed="learned"
    )
    new = task.net.head.weight.clone()
    told = load_initial(task, data, source, resize="usual", grid=None)
    assert torch.equal(task.net.head.weight, new) == is_other
    assert ("head: not loaded, the file's is in another order than the data's" in told) == is_other


def net_arguments():
    return {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0} | {
        "norm_eps": 1e-12
    }


def test_a_scale_of_the_table_does_not_change_what_is_added():
    theirs = random_net("ViTModel", "ViT", WIDE)
    file = peer_file(theirs, "hf:random")
    scaled = {"class_path": "learned", "init_args": {"scale": 4.0}}
    ours = VisionTransformer(**file.arguments | {"pos_embed": scaled}).eval()
    load_weights(ours, file)
    images = torch.randn(2, 3, *ours.img_size)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), peer_outputs(theirs, images), atol=1e-4, rtol=0)


@pytest.mark.parametrize("representation_size", [None, 12])
def test_a_vit_of_torchvision_computes_the_same(representation_size):
    from torchvision.models import VisionTransformer as TorchvisionViT

    torch.manual_seed(0)
    theirs = TorchvisionViT(32, 8, 2, 2, 24, 48, num_classes=5, representation_size=representation_size).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn_like(p))
    assert_equal(theirs, "torchvision:random")


def test_an_unknown_torchvision_name_is_refused_with_the_closest():
    with pytest.raises(ValueError, match=r"torchvision has the ViTs vit_b_16, .*, got 'vit_b_17'; did you mean \"vit"):
        create_model("torchvision:vit_b_17")
