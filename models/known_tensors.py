"""Recognizing tensors that were read before, so that what was read need not be copied from the device again."""

from __future__ import annotations

import weakref

from torch import Tensor


class KnownTensors:
    """These very tensors, by identity and by the changes in place that PyTorch counts; keeps none of them alive."""

    def __init__(self, *tensors: Tensor) -> None:
        self._known = tuple((weakref.ref(x), version(x)) for x in tensors)

    def are(self, *tensors: Tensor) -> bool:
        """Whether these are they, unchanged. Never for inference tensors: nobody counts their changes."""
        return len(tensors) == len(self._known) and all(
            known() is x and count is not None and count == version(x)
            for (known, count), x in zip(self._known, tensors, strict=True)
        )


def version(x: Tensor) -> int | None:
    """How often x was changed in place; None for an inference tensor."""
    return None if x.is_inference() else x._version
