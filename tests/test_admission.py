"""What is refused before anything is computed: a row that could never fit, with advice that works."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_for_tests import CHAT_TEMPLATE, byte_level

from pagedgen.admission import Admission, Limits
from pagedgen.config import EngineConfig
from pagedgen.errors import RowError
from pagedgen.request import BeamParams, Request, SamplingParams
from pagedgen.text.tokenizer import Tokenizer

LIMITS = Limits(
    vocab_size=300, max_position=512, max_model_len=512, num_blocks=5, block_size=16, bytes_per_block=360 << 10
)
TOKENIZER = Tokenizer(byte_level(chat_template=CHAT_TEMPLATE))


def admit(limits, length, max_tokens, n=1, beam=None):
    params = SamplingParams(max_tokens=max_tokens, n=n)
    admission = Admission(EngineConfig(), limits, TOKENIZER, (), params)
    return admission.group(Request(0, "0", params=params, beam=beam), range(length))


@given(st.integers(1, 250), st.integers(1, 250), st.integers(1, 5), st.booleans())
def test_what_an_unfit_row_is_advised_to_do_works(length, max_tokens, width, searches):
    beam = BeamParams(width) if searches else None
    n = 1 if searches else width
    try:
        admit(LIMITS, length, max_tokens, n, beam)
    except RowError as error:
        message = error.message
    else:
        return
    megabytes = int(re.search(r"raise --kv-memory to (\d+)MiB", message)[1])
    larger = replace(LIMITS, num_blocks=(megabytes << 20) // LIMITS.bytes_per_block)
    assert admit(larger, length, max_tokens, n, beam)
    lower = re.search(r"lower --max-tokens to (\d+)", message)
    if lower is None:
        assert "shorten the prompt and lower --max-tokens" in message
        with pytest.raises(RowError):
            admit(LIMITS, length, 1, n, beam)
    else:
        assert admit(LIMITS, length, int(lower[1]), n, beam)
        with pytest.raises(RowError):
            admit(LIMITS, length, int(lower[1]) + 1, n, beam)
    assert (f"lower {'--width' if searches else '-n'}" in message) == (width > 1)
