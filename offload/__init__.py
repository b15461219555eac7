"""Parameters between host and device: model-level and layerwise CPU offload for inference."""

from .layerwise import LayerwiseOffload
from .model import ModelOffload
from .offload_config import OffloadConfig
from .refused import OffloadRefusedError

__all__ = ["LayerwiseOffload", "ModelOffload", "OffloadConfig", "OffloadRefusedError"]
