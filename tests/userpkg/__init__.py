"""What a user of vitlab brings: a module, data and parts that know nothing of vitlab."""

from userpkg.data import Bars
from userpkg.net import Net

__all__ = ["Bars", "Net"]
