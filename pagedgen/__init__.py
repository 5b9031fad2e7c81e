"""pagedgen: offline batch generation over a paged, shared and measured KV cache.

    from pagedgen import Engine, EngineConfig, Request, SamplingParams

    engine = Engine(EngineConfig(model="HuggingFaceTB/SmolLM2-135M-Instruct"))
    for completion in engine.generate([Request(row=0, id="0", prompt="The sea is")]):
        print(completion.text)

`Engine` is imported on first use, so that `import pagedgen` stays cheap: it needs neither torch nor transformers.
"""

from typing import TYPE_CHECKING, Any

from pagedgen.config import EngineConfig
from pagedgen.errors import PagedgenError, RowError, UsageError
from pagedgen.request import BeamParams, Completion, Request, SamplingParams, Status

if TYPE_CHECKING:
    from pagedgen.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "BeamParams",
    "Completion",
    "Engine",
    "EngineConfig",
    "PagedgenError",
    "Request",
    "RowError",
    "SamplingParams",
    "Status",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from pagedgen.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
