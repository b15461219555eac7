"""The model families, and what is looked up in them. A new family is a file like the four, added to `FAMILIES`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallel_attn.errors import require

from .checkpoints.folder import read_index
from .cosmos3 import COSMOS3
from .family import Family
from .minimax_h3 import MINIMAX_H3
from .model_plan import ModelPlan
from .model_refusals import refuse
from .pipeline_form import PipelineForm
from .qwen_image import QWEN_IMAGE
from .sizes import Sizes
from .wan import WAN

FAMILIES: tuple[Family, ...] = (COSMOS3, MINIMAX_H3, QWEN_IMAGE, WAN)

PLANS: dict[str, ModelPlan] = {family.plan.transformer: family.plan for family in FAMILIES}
"""Every supported transformer class by name."""
SIZES: dict[str, Sizes] = {family.plan.name: family.sizes for family in FAMILIES}
"""By the name of the family's plan."""
FORMS: dict[str, PipelineForm] = {form.name: form for family in FAMILIES for form in family.forms}
"""Every pipeline class that the commands can call, by name."""


def form_of_checkpoint(folder: Path) -> PipelineForm:
    """The form of a checkpoint folder's pipeline; raises `UnsupportedError` for a class without one."""
    name = read_index(folder)["_class_name"]
    if name not in FORMS:
        instead = f"a checkpoint of {', '.join(FORMS)}, or models.parallelize() on your own pipeline"
        require([refuse("not-built", what=f"Settings.model with a {name}", instead=instead)])
    return FORMS[name]


def form_of_pipeline(pipeline: Any) -> PipelineForm:
    """The form of a pipeline that a form loaded."""
    return FORMS[type(getattr(pipeline, "modular", pipeline)).__name__]
