# host_optimizer.py
"""`host_optimizer`: moments and master weights live in host memory, where the CPU updates them."""

from typing import Any

import numpy as np

from bo_tuner.config import TrainConfig
from bo_tuner.dimension import Dimension
from bo_tuner.models.terms import Estimate

HOST_BYTES_PER_S = 80e9  # memory of a socket
LINK_BYTES_PER_S = 12e9  # PCIe 3.0 x16, one way
UPDATED_BYTES = 28  # that Adam reads and writes for a parameter: master weight and two moments both ways, gradient


def legal(config: TrainConfig, value: str) -> bool:
    return value == "none" or (config.zero_stage >= 1 and config.pipeline_depth == 1)


def memory(told: Estimate) -> dict[str, Any]:
    return {"optimizer": np.where(told.values == "cpu", 0.0, told.parts["optimizer"])}


def time(told: Estimate) -> dict[str, Any]:
    copied_s = 2 * told.problem.profile.element_bytes / LINK_BYTES_PER_S  # gradients there, weights back
    on_host_s = told.n_parameters * (UPDATED_BYTES / HOST_BYTES_PER_S + copied_s)
    return {"optimizer": np.where(told.values == "cpu", on_host_s, told.parts["optimizer"])}


HOST_OPTIMIZER = Dimension(
    name="host_optimizer",
    values=("none", "cpu"),
    path="zero_optimization.offload_optimizer.device",
    legal=legal,
    memory=memory,
    time=time,
)
