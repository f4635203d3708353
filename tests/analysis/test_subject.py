"""A subject: in which precision its network is, and what it measures after network or images have changed."""

import numpy as np
import pytest
import torch
from PIL import Image
from small_nets import small_net
from torchvision.transforms.functional import to_tensor

from vitlab.analysis.features import analyze_knn
from vitlab.analysis.outcomes.outcome import outcome_of
from vitlab.analysis.scramble import labels_known
from vitlab.analysis.subject import Subject
from vitlab.data.known import Digits
from vitlab.errors import UsageError


def test_a_subject_that_is_used_again_measures_the_present_network_on_the_present_images(digits):
    net = small_net(drop_path_rate=0.5)
    subject = Subject(net, digits, num_images=16)
    seen = [subject.outputs()]

    def trained():  # as in a notebook; torch counts no change of `data`
        net.train()
        net.head.weight.data.neg_()

    for change in (trained, lambda: setattr(subject, "num_images", 8)):
        assert subject.outputs() is seen[-1]  # until something changes
        change()
        seen.append(subject.outputs())
        torch.testing.assert_close(seen[-1], Subject(net, digits, num_images=subject.num_images).outputs())
    assert not torch.equal(seen[0], seen[1]) and len(seen[-1]) == 8
    before = outcome_of(subject).outputs
    net.head.bias.data[3] += 5.0
    assert outcome_of(subject).outputs[:, 3].mean() > before[:, 3].mean() + 0.1


def test_other_pictures_of_a_subject_have_outputs_of_their_own():
    first, others = torch.randn(2, 3, 1, 8, 8)
    subject = Subject(small_net().train(), lambda image: image, pictures=first)
    before = subject.outputs()
    subject.pictures = others
    assert not torch.equal(subject.outputs(), before)


def test_a_single_picture_needs_no_list_and_what_is_no_picture_is_refused(tmp_path):
    net, image, file = small_net(), Image.new("L", (8, 8), 100), tmp_path / "a.png"
    image.save(file)
    for picture in (image, file, str(file)):
        one, several = (Subject(net, to_tensor, pictures=given).shown() for given in (picture, [picture]))
        assert torch.equal(one, several) and one.shape == (1, 1, 8, 8)
    for wrong, kind in (([np.zeros((8, 8))], "ndarray"), ([], "none")):
        with pytest.raises(UsageError, match=f"^`pictures` must be PIL images or image files, got {kind}$"):
            Subject(net, to_tensor, pictures=wrong)


def test_images_of_another_number_of_classes_than_the_network_tells_apart_have_no_accuracy(digits):
    subject = Subject(small_net(num_classes=12), digits, num_images=16)
    with pytest.raises(UsageError, match="these images have other classes than model, so accuracy cannot be measured"):
        outcome_of(subject)
    assert not labels_known(subject, "shift") and subject.class_names[11] == "class 11"
    assert analyze_knn(subject).table["classes"].tolist()[0] == "classes that the network was not trained on"


def test_black_is_that_of_a_pixel_of_0():
    assert Subject(small_net(), Digits(mean=[0.5], std=[0.25])).black().tolist() == [[[-2.0]]]


def test_pictures_of_a_transform_that_does_not_tell_black_from_white_are_drawn_in_one_gray():
    """The scale was infinite, and `look` ended in a warning."""
    subject = Subject(small_net(), lambda image: torch.full((1, 8, 8), 0.25), pictures=torch.full((2, 1, 8, 8), 0.25))
    assert subject.data.statistics() == ((-0.25,), (1.0,))
    assert subject.pixels(subject.shown()).unique().tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_network_of_another_precision_than_its_images_is_refused_in_one_line(digits, dtype):
    said = f"model computes in {str(dtype)[6:]}, and analyses in float32: take `net.float\\(\\)`"
    for net in (small_net(), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))):
        with pytest.raises(UsageError, match=said):
            Subject(net.to(dtype), digits)


def test_a_network_of_64_bits_takes_pictures_of_64_bits():
    pictures = torch.randn(3, 1, 8, 8).double()
    assert Subject(small_net().double(), lambda image: image, pictures=pictures).outputs().dtype == torch.float64
