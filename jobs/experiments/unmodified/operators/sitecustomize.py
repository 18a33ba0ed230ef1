"""Declares torchvision's compiled operators, which its wheel lacks beside a CPU build of torch; timm imports torchvision,
and uses none of them."""

import importlib.util
import re
from pathlib import Path

import torch

_found = importlib.util.find_spec("torchvision")
if _found and _found.origin:
    _library = torch.library.Library("torchvision", "DEF")
    _text = (Path(_found.origin).parent / "_meta_registrations.py").read_text()
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for _name in set(re.findall(r'register_meta\("(\w+)"\)', _text)):
        _library.define(f"{_name}(Tensor a) -> Tensor")
