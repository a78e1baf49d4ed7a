"""Finds the fastest training configuration that fits, by short real training steps.

from bo_tuner import tune
result = tune("bert-tiny", budget="10 trials")

from bo_tuner import plan
expected = plan("gpt-2.2b", cluster="8x8xV100-16GB", global_batch=512, seq_len=512)
"""

from __future__ import annotations

from bo_tuner.budget import Budget
from bo_tuner.cluster import Cluster, MemoryLimit
from bo_tuner.config import TrainConfig
from bo_tuner.dimension import Dimension
from bo_tuner.errors import BoTunerError
from bo_tuner.objectives.simulated import Simulation
from bo_tuner.outcome import Measurement, Outcome, TrialLimits, TrialResult
from bo_tuner.plan import plan
from bo_tuner.space import BatchRule, SearchSpace
from bo_tuner.trial import TrialRecord
from bo_tuner.tune import TuneResult, tune
from bo_tuner.workload import ModelSpec, Workload

__all__ = [
    "BatchRule",
    "BoTunerError",
    "Budget",
    "Cluster",
    "Dimension",
    "Measurement",
    "MemoryLimit",
    "ModelSpec",
    "Outcome",
    "SearchSpace",
    "Simulation",
    "TrainConfig",
    "TrialLimits",
    "TrialRecord",
    "TrialResult",
    "TuneResult",
    "Workload",
    "plan",
    "tune",
]
