"""How fast devices and their links are: from data sheets, or as a calibration measured them."""

from bo_tuner.hardware.catalogue import CATALOGUE, DeviceSheet
from bo_tuner.hardware.fit import ProductReading, fit_matmul
from bo_tuner.hardware.names import find_device
from bo_tuner.hardware.of_cluster import REACHED, Reached, hardware_of
from bo_tuner.hardware.rates import Hardware, Link, MatmulRate

__all__ = [
    "CATALOGUE",
    "REACHED",
    "DeviceSheet",
    "Hardware",
    "Link",
    "MatmulRate",
    "ProductReading",
    "Reached",
    "find_device",
    "fit_matmul",
    "hardware_of",
]
