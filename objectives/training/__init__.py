"""Real training steps as the objective. Importing this touches neither torch nor DeepSpeed."""

from bo_tuner.objectives.training.deepspeed_backend import DeepSpeedBackEnd, deepspeed_config
from bo_tuner.objectives.training.facts import ModelFacts, model_facts
from bo_tuner.objectives.training.objective import TrainingObjective, training_server

__all__ = [
    "DeepSpeedBackEnd",
    "ModelFacts",
    "TrainingObjective",
    "deepspeed_config",
    "model_facts",
    "training_server",
]
