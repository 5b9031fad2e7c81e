"""What a beam search may be asked for, and the sentence for what it may not."""

import math
import re
from dataclasses import fields, replace

import numpy as np
import pytest

from pagedgen import BeamParams
from pagedgen.beam_params import MAX_WIDTH, beam_flag, validate_beam


def test_the_defaults_are_allowed_and_stay_as_they_are():
    assert validate_beam(BeamParams()) == BeamParams()


def test_values_come_back_in_their_own_types():
    given = BeamParams(np.int64(6), np.int32(2), 2, True, np.int8(3), np.float32(0.5))
    found = validate_beam(given)
    assert found == BeamParams(6, 2, 2.0, "true", 3, 0.5)
    types = [type(getattr(found, field.name)) for field in fields(found)]
    assert types == [int, int, float, str, int, float]


@pytest.mark.parametrize("width", [1, 2, MAX_WIDTH])
def test_all_of_the_beams_may_be_returned(width):
    assert validate_beam(BeamParams(width, width), max_seqs=width).num_return == width


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"width": 0}, ["width is 0", "1 to 64"]),
        ({"width": 65}, ["width is 65", "1 to 64"]),
        ({"width": 2.0}, ["width is 2.0", "whole number"]),
        ({"width": True}, ["width is True", "whole number"]),
        ({"width": "4"}, ["width is '4'", "whole number"]),
        ({"width": None}, ["width is None", "whole number"]),
        ({"num_return": 0}, ["num_return is 0", "1 to 4", "width"]),
        ({"num_return": 5}, ["num_return is 5", "1 to 4", "width"]),
        ({"length_penalty": math.inf}, ["length_penalty is inf", "from -10 to 10"]),
        ({"length_penalty": -math.inf}, ["length_penalty is -inf", "from -10 to 10"]),
        ({"length_penalty": math.nan}, ["length_penalty is nan", "from -10 to 10"]),
        ({"length_penalty": 10.5}, ["length_penalty is 10.5", "from -10 to 10"]),
        ({"length_penalty": "1"}, ["length_penalty is '1'", "from -10 to 10"]),
        ({"early_stopping": "maybe"}, ["early_stopping is 'maybe'", "true, false or never"]),
        ({"early_stopping": 1}, ["early_stopping is 1", "true, false or never"]),
        ({"diversity_groups": 0}, ["diversity_groups is 0", "1 to 4", "width"]),
        ({"diversity_groups": 8}, ["diversity_groups is 8", "1 to 4", "width"]),
        ({"diversity_groups": 3}, ["width is 4", "multiple of diversity_groups", "3"]),
        ({"diversity_groups": 2, "diversity_penalty": -0.1}, ["diversity_penalty is -0.1", "from 0"]),
        ({"diversity_groups": 2, "diversity_penalty": math.nan}, ["diversity_penalty is nan", "from 0"]),
        ({"diversity_groups": 2, "diversity_penalty": math.inf}, ["diversity_penalty is inf", "from 0"]),
        ({"diversity_penalty": 0.5}, ["diversity_penalty is 0.5", "diversity_groups to 2 or more"]),
    ],
)
def test_what_cannot_be_searched_is_named(values, words):
    with pytest.raises(ValueError, match=f"^{re.escape(words[0])}") as caught:
        validate_beam(replace(BeamParams(), **values))
    message = str(caught.value)
    assert "\n" not in message
    for word in words[1:]:
        assert word in message


def test_a_search_that_could_never_run_whole_is_refused():
    assert validate_beam(BeamParams(8), max_seqs=8).width == 8
    with pytest.raises(ValueError, match="width is 8, but only 7 sequences run at a time; lower it or raise max_seqs"):
        validate_beam(BeamParams(8), max_seqs=7)


def test_fields_are_called_what_the_user_calls_them():
    with pytest.raises(ValueError, match=r"^--return is 9, but .* from 1 to 4, which is --width$"):
        validate_beam(BeamParams(num_return=9), spell=beam_flag)
    with pytest.raises(ValueError, match=r"^--length-penalty is nan"):
        validate_beam(BeamParams(length_penalty=math.nan), spell=beam_flag)
    with pytest.raises(ValueError, match=r"raise --max-seqs$"):
        validate_beam(BeamParams(8), max_seqs=7, spell=beam_flag)
