"""Chats to text: transformers' own rendering of a model's chat template, in a sandbox that bounds it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import FunctionType
from typing import Any

import jinja2

from pagedgen.text.sandbox import BoundedEnvironment

# (messages, continue_final_message) -> text
RenderChat = Callable[[Sequence[Mapping[str, Any]], bool], str]


def chat_renderer(hf_tokenizer: Any, now: Callable[[], datetime]) -> RenderChat:
    """Renders with the tokenizer's chat template. now: the moment that the template's `strftime_now` tells.

    What it returns takes the messages and whether the last one is continued; it raises whatever the template raises.
    A tokenizer with its own way of rendering chats (mistral-common's, or one that comes with a model) keeps it as it
    is.
    """
    from transformers import PreTrainedTokenizerBase

    kind = type(hf_tokenizer)
    if kind.apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
        return _bounded(hf_tokenizer, now)

    def render(messages: Sequence[Mapping[str, Any]], continue_final_message: bool) -> str:
        text: str = hf_tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
        )
        return text

    return render


def _bounded(hf_tokenizer: Any, now: Callable[[], datetime]) -> RenderChat:
    """transformers' renderer, calling our compiler of templates where it calls its own.

    It is copied with other globals, so that nothing changes for others in this process who call it. What
    `apply_chat_template` does before it for every chat, such as naming the special tokens, is done once.
    """
    from transformers.utils import chat_template_utils as theirs

    @functools.cache
    def compiled(source: str) -> jinja2.Template:
        return _environment(theirs._compile_jinja_template("").environment, now).from_string(source)

    renderer = _with_globals(theirs.render_jinja_template, _compile_jinja_template=compiled)
    special_tokens = dict(hf_tokenizer.special_tokens_map)

    def render(messages: Sequence[Mapping[str, Any]], continue_final_message: bool) -> str:
        texts, _ = renderer(
            conversations=[list(messages)],
            chat_template=hf_tokenizer.get_chat_template(),
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
            **special_tokens,
        )
        return str(texts[0])

    return render


def _environment(theirs: jinja2.Environment, now: Callable[[], datetime]) -> BoundedEnvironment:
    """What transformers compiles chat templates with, bounded."""
    ours = BoundedEnvironment(
        trim_blocks=theirs.trim_blocks,
        lstrip_blocks=theirs.lstrip_blocks,
        extensions=[type(extension) for extension in theirs.extensions.values()],
    )
    ours.filters = dict(theirs.filters)
    ours.tests = dict(theirs.tests)
    ours.globals |= theirs.globals
    ours.globals["strftime_now"] = lambda format: now().strftime(format)
    ours.bound_filters()
    return ours


def _with_globals(function: FunctionType, **names: Any) -> FunctionType:
    """A copy of the function that sees these objects under these names of its module."""
    copy = FunctionType(
        function.__code__, function.__globals__ | names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
