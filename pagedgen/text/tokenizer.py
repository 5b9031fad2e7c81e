"""A model's tokenizer: text to ids, ids to text, and chats to text, over the transformers library.

Transformers is imported inside `Tokenizer.load`, so that importing this module stays cheap.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from textwrap import shorten
from typing import Any

from pagedgen.errors import PagedgenError
from pagedgen.text.chat_templates import RenderChat, chat_renderer

# What this module calls on the Rust tokenizer directly is only equal to transformers where a class keeps these methods.
_METHODS_TO_KEEP = ("__call__", "_encode_plus", "decode", "_decode", "convert_tokens_to_string")

# What normalizers change: case, width, accents and characters that are not seen.
_SAMPLE = "Aa\uff1c\uff5c\u00c9e\u0301\u200b\u00ad\x01\u0130"


class Tokenizer:
    """Wraps a transformers tokenizer, Rust ("fast") or pure Python ("slow").

    One thread may encode while another decodes: a Rust tokenizer is never reconfigured after loading.

    vocab_size: ids are below it (added tokens included); the model's embedding may be larger.
    eos_token_ids: the tokenizer's own end token, if any; the generation config may name more.
    adds_bos: whether `add_special_tokens=True` puts the BOS token in front of a text.
    special_ids: ids that `decode` skips.
    special_tokens: text -> id of the special tokens that `encode_batch` finds written out in a text. Not among them
        are added tokens that are not special, such as `<think>`, and byte tokens, which stand for their byte anyway.
    byte_values: id -> byte, for the `<0x00>` .. `<0xFF>` tokens of vocabularies with byte fallback.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self._rust = _plain_rust_tokenizer(hf_tokenizer)
        added: Mapping[int, Any] = hf_tokenizer.added_tokens_decoder
        self.vocab_size: int = max(len(hf_tokenizer), max(added, default=-1) + 1)
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        eos: int | None = hf_tokenizer.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        special = {i for i, token in added.items() if token.special}
        self.special_ids: frozenset[int] = frozenset(special | set(hf_tokenizer.all_special_ids))
        self.byte_values: Mapping[int, int] = self._find_byte_tokens()
        self.special_tokens: Mapping[str, int] = self._find_special_tokens(added)
        self._longest_token: int | None = None
        self._render_chat = self.chat_renderer(datetime.now)
        template = hf_tokenizer.chat_template
        self.has_chat_template: bool = "default" in template if isinstance(template, dict) else bool(template)
        self.adds_bos: bool = self._encode([""], add_special_tokens=True)[0][:1] == [self.bos_token_id]

    @classmethod
    def load(cls, path: str, trust_remote_code: bool = False) -> "Tokenizer":
        """Loads the tokenizer of a local model folder or a Hub id.

        trust_remote_code: run the Python code that comes with the tokenizer's files, where it needs it. Raises
        PagedgenError, in one sentence, when there is none or it cannot be read.
        """
        try:
            return cls(_load_transformers_tokenizer(path, trust_remote_code))
        except Exception as error:  # transformers raises OSError, ValueError, ImportError, KeyError and Rust's own
            reason = shorten(str(error), 300) or type(error).__name__
            raise PagedgenError(f"The tokenizer of {path} cannot be loaded: {reason}") from error

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text; with add_special_tokens the ones the tokenizer adds by default, but no second BOS.

        Special tokens written out in a text are parsed, as the tokenizer does by default; texts in which some of them
        are not to be parsed are for `special_tokens.GuardedEncoder`.
        """
        if not texts:
            return []
        encoded = self._encode(texts, add_special_tokens)
        if add_special_tokens and self.adds_bos:
            two = [self.bos_token_id, self.bos_token_id]
            return [ids[1:] if ids[:2] == two else ids for ids in encoded]
        return encoded

    def encode_each(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int] | Exception]:
        """Like `encode_batch`; a text that the tokenizer cannot take gives its error and does not stop the others."""
        try:
            return list(self.encode_batch(texts, add_special_tokens))
        except Exception as error:  # tokenizers of different kinds raise anything
            if len(texts) == 1:
                return [error]
            return [outcome for text in texts for outcome in self.encode_each([text], add_special_tokens)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens, and ids the vocabulary does not have, leave nothing behind."""
        if self._rust is not None:
            return str(self._rust.decode(list(ids), skip_special_tokens=True))
        known = [i for i in ids if i < self.vocab_size and i not in self.special_ids]
        if not known:
            return ""
        return str(self._hf.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def most_characters(self, num_tokens: int) -> int:
        """More characters than a text of `num_tokens` tokens can have, whatever a normalizer drops."""
        if self._longest_token is None:
            self._longest_token = max(len(self.token_string(i)) for i in range(self.vocab_size))
        return 4 * self._longest_token * num_tokens

    def token_text(self, token_id: int) -> str:
        """What a token adds to a text, a space in front included; part of a character comes as U+FFFD."""
        spelling = self.token_string(token_id)
        if token_id in self.special_ids or "▁" in spelling:
            return spelling.replace("▁", " ")
        return self.decode([token_id]) or spelling

    def token_string(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token, like `Ġsea`; empty for an id that it does not have."""
        if not 0 <= token_id < self.vocab_size:
            return ""
        token = self._rust.id_to_token(token_id) if self._rust is not None else self._hf.convert_ids_to_tokens(token_id)
        return "" if token is None else str(token)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], continue_final_message: bool) -> str:
        """The chat as text, ready for `encode_batch(..., add_special_tokens=False)`: templates write their own BOS.

        It ends where an assistant's answer begins, or, with continue_final_message, in the last message, left open.
        Raises what the template raises (jinja2.TemplateError, ValueError, TypeError, ...).
        """
        return self._render_chat(messages, continue_final_message)

    def chat_renderer(self, now: Callable[[], datetime]) -> RenderChat:
        """Like `render_chat`, for templates that write the date: `now` gives the moment for it."""
        return chat_renderer(self._hf, now)

    @property
    def chat_template_text(self) -> str:
        """The source of the chat templates, empty where there is none."""
        template = self._hf.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    def backend_json(self) -> str | None:
        """The Rust tokenizer in the format of `tokenizer.json`; None where there is none or it holds Python code."""
        try:
            return None if self._rust is None else str(self._rust.to_str())
        except Exception:  # a component in Python has no JSON, and Rust's error for it has no type of its own
            return None

    @property
    def normalize(self) -> Callable[[str], str] | None:
        """What is done to a text before it is tokenized, where that is more than to write spaces in another way."""
        normalizer = None if self._rust is None else self._rust.normalizer
        # One that keeps these keeps all that special tokens are made of.
        if normalizer is None or _SAMPLE in normalizer.normalize_str(_SAMPLE):
            return None
        return lambda text: str(normalizer.normalize_str(text))

    @property
    def unknown_token(self) -> str | None:
        """The token that stands for what the vocabulary does not have."""
        token: str | None = self._hf.unk_token
        return token

    @functools.cached_property
    def added_ids(self) -> tuple[list[int], list[int]]:
        """The ids that `add_special_tokens=True` puts before and after those of a text."""
        plain, whole = self._encode(["a"], False)[0], self._encode(["a"], True)[0]
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), len(whole))
        return whole[:at], whole[at + len(plain) :]

    def encode_literally(self, text: str) -> list[int]:
        """Token ids of a text in which no special token is parsed, and to which none is added."""
        if self._rust is None:
            ids: list[int] = self._hf(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            return ids
        self._rust.encode_special_tokens = True
        try:
            return list(self._rust.encode(text, add_special_tokens=False).ids)
        finally:
            self._rust.encode_special_tokens = False

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        if self._rust is not None:
            encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]
        encoded = self._hf(
            list(texts),
            add_special_tokens=add_special_tokens,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _find_special_tokens(self, added: Mapping[int, Any]) -> dict[str, int]:
        if self._hf.split_special_tokens:  # this tokenizer parses none
            return {}
        found = {token.content: i for i, token in added.items() if token.special}
        found |= zip(self._hf.all_special_tokens, self._hf.all_special_ids, strict=True)
        return {text: i for text, i in found.items() if text and not re.fullmatch(r"<0x[0-9A-F]{2}>", text)}

    def _find_byte_tokens(self) -> dict[int, int]:
        values: dict[int, int] = {}
        for byte in range(256):
            token = f"<0x{byte:02X}>"
            if self._rust is not None:
                token_id = self._rust.token_to_id(token)
            else:
                token_id = self._hf.convert_tokens_to_ids(token)
            if token_id is not None and self.token_string(token_id) == token:
                values[token_id] = byte
        return values


def _plain_rust_tokenizer(hf_tokenizer: Any) -> Any | None:
    """The tokenizers.Tokenizer inside, set to neither truncate nor pad, where using it directly changes nothing."""
    from transformers import TokenizersBackend

    if not isinstance(hf_tokenizer, TokenizersBackend):
        return None
    kind = type(hf_tokenizer)
    if any(getattr(kind, name) is not getattr(TokenizersBackend, name) for name in _METHODS_TO_KEEP):
        return None
    rust = hf_tokenizer.backend_tokenizer
    rust.no_truncation()
    rust.no_padding()
    rust.encode_special_tokens = bool(hf_tokenizer.split_special_tokens)
    return rust


def _load_transformers_tokenizer(path: str, trust_remote_code: bool) -> Any:
    if _is_plain_folder(Path(path)):
        # 0.25 s instead of 0.65: AutoTokenizer comes to the same class, but imports every model's configuration first.
        from transformers import TokenizersBackend

        return TokenizersBackend.from_pretrained(path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def _is_plain_folder(folder: Path) -> bool:
    """Whether AutoTokenizer is sure to take the generic Rust class: it overrides the stated one for some models."""
    tokenizer_config = folder / "tokenizer_config.json"
    if not (tokenizer_config.is_file() and (folder / "tokenizer.json").is_file()):
        return False
    stated = json.loads(tokenizer_config.read_text(encoding="utf-8"))
    if stated.get("tokenizer_class") != "TokenizersBackend" or "auto_map" in stated:
        return False
    model_config = folder / "config.json"
    if not model_config.is_file():
        return True
    return bool(json.loads(model_config.read_text(encoding="utf-8")).get("model_type") == "llama")
