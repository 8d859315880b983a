"""Lets torchvision's wheel for CUDA be imported where CUDA is not.

Its operators live in a library that cannot be loaded then, but its Python code describes two of
them on import and fails without their schemas. A finder defines the schemas at the first look-up of
`torchvision`, and finds nothing itself: an interpreter that never imports it pays nothing.
"""

import importlib.abc
import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept = []  # a library's definitions last as long as it does


class SchemasFirst(importlib.abc.MetaPathFinder):
    """Defines the schemas, once, before anything else looks for torchvision."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torchvision" or _kept:
            return
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        _kept.append(library)
        for schema in SCHEMAS:
            library.define(schema)
        return


sys.meta_path.insert(0, SchemasFirst())
