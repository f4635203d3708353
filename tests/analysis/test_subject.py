"""A subject over time: its network is trained on, its images change."""

import torch
from small_nets import small_net

from vitlab.analysis.outcomes.outcome import outcome_of
from vitlab.analysis.subject import Subject


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
