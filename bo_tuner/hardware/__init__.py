"""How fast devices and their links are."""

from bo_tuner.hardware.rates import Hardware, Link, MatmulRate

__all__ = ["Hardware", "Link", "MatmulRate"]
