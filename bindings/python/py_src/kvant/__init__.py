"""LLM inference with a small KV cache.

| task | item |
|---|---|
| generate texts | `LLM`, `SamplingParams` |
| a small cache in `transformers` | `kvant.transformers.KvantCache` |
| choose a cache type for a model | `eval` |
| study a cache type | `Codec`, `attend` |
| the command | `kvant` in a terminal |
"""

import glob as _glob
import os as _os
import sys as _sys

from . import _kvant
from ._codec import Codec, Encoded, attend
from ._eval import EvalTable, eval
from ._kvant import __version__
from .llm import LLM
from .outputs import CompletionOutput, Logprob, RequestOutput
from .sampling import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "Codec",
    "CompletionOutput",
    "Encoded",
    "EvalTable",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "attend",
    "eval",
]


def _cuda_folders() -> list[str]:
    """The folders of NVIDIA's packages, which have libnvrtc and cuBLASLt."""
    places = [_os.path.dirname(_os.path.dirname(_os.path.abspath(__file__))), *_sys.path]
    found = (_glob.glob(_os.path.join(_glob.escape(place), "nvidia", "*", "lib")) for place in places if place)
    return list(dict.fromkeys(folder for folders in found for folder in sorted(folders, reverse=True)))


_kvant.search_cuda_libraries(_cuda_folders())
