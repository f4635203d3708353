"""What tests do to networks."""

from torch import nn


def randomized(net, std=0.3):
    """Draw every parameter, weights of normalizations around one: what starts at zero hides mistakes."""
    for name, p in net.named_parameters():
        nn.init.normal_(p, std=std, mean=1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return net.eval()
