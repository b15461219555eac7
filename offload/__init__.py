"""Parameters between host and device: model-level and layerwise CPU offload for inference."""

from .config import OffloadConfig
from .errors import OffloadRefusedError
from .layerwise import LayerwiseOffload
from .model import ModelOffload

__all__ = ["LayerwiseOffload", "ModelOffload", "OffloadConfig", "OffloadRefusedError"]
