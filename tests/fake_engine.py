"""An engine without a model, for tests of whole jobs: its completions depend on the row alone, and come in any
order."""

import itertools
import random
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from tokenizers_for_tests import CHAT_TEMPLATE, byte_level

from pagedgen.request import Completion, FinishReason, Request, Status
from pagedgen.stats.types import RunInfo
from pagedgen.text.tokenizer import Tokenizer

# Requests that are under way at a time.
WINDOW = 7


class FakeEngine:
    """What a job uses of an engine. Every eleventh row gives `nan_logits`."""

    device_bytes = None
    generation_config: dict[str, Any] = {}  # noqa: RUF012
    kernels_note = None
    max_model_len = 4096
    spec = SimpleNamespace(vocab_size=1 << 20)
    info = RunInfo("fake", "cpu", "float32", "none", 1 << 20, 64, 16)
    tokenizer = Tokenizer(byte_level(chat_template=CHAT_TEMPLATE))
    made = 0

    def __init__(self, config: object, **callbacks: object) -> None:
        type(self).made += 1

    def complete(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
        source, shuffled, under_way = iter(requests), random.Random(0), []
        while under_way := under_way + list(itertools.islice(source, WINDOW - len(under_way))):
            yield completions(under_way.pop(shuffled.randrange(len(under_way))))


def completions(request: Request) -> list[Completion]:
    assert request.params is not None
    assert request.prompt_token_ids is not None
    length = len(request.prompt_token_ids)
    if request.row % 11 == 10:
        return [Completion(request.row, request.id, 0, Status.NAN_LOGITS, error="no number", prompt_tokens=length)]
    return [
        Completion(
            request.row,
            request.id,
            sample,
            Status.OK,
            text=f"{length} {request.params.seed} {sample}",
            finish_reason=FinishReason.STOP,
            prompt_tokens=length,
            token_ids=(length, sample),
        )
        for sample in range(request.params.n)
    ]
