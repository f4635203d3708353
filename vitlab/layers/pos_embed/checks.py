"""Checks of the arguments of rotary position embeddings."""


def check_rotation(name: str, head_dim: int, theta: float) -> float:
    """Return ``theta``, after checking that it is above 1 and that 4 divides the width of a head.

    Example:
        >>> check_rotation("rope2d", head_dim=64, theta=100.0)
        100.0
    """
    if head_dim % 4:
        raise ValueError(
            f"`embed_dim` / `num_heads` must be divisible by 4 for pos_embed={name!r}, got a head width of {head_dim}"
        )
    if not theta > 1:
        raise ValueError(f"`rope_theta` must be above 1, got rope_theta={theta}")
    return theta


def check_word(name: str, value: str, *words: str) -> None:
    """Refuse a value that is not one of ``words``.

    Example:
        >>> check_word("axes", "xy", "xy", "yx")
    """
    if value not in words:
        raise ValueError(f"`{name}` must be one of {', '.join(words)}, got {value!r}")
