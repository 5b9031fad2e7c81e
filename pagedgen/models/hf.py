"""Every other decoder: the modelling code of `transformers` with its attention calls sent to the paged cache.

The tokens of all sequences go through the model as one row, [1, T], with explicit positions and without a cache of its
own. `transformers` looks attention functions up by name and hands unknown keywords through to them, so the batch
travels as the keyword `pagedgen_call`; nothing is kept between calls. A model is used only once it has passed
`self_check`.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pagedgen.errors import PagedgenError
from pagedgen.execution.attention import AttentionBackend, choose_backend
from pagedgen.execution.batch import ForwardBatch
from pagedgen.execution.kv_cache import KVCache
from pagedgen.models.base import ModelSpec
from pagedgen.models.falcon import CallAsCache, adapt_falcon
from pagedgen.models.gated import fuse_gated
from pagedgen.models.hook import ATTENTION_NAME, AttentionCall, PagedCall, Probe, UnusableModel, register_attention
from pagedgen.models.linear import pack_linears
from pagedgen.models.long_rope import fold_lengths, follow_lengths

# What `transformers` raises in loading and in running a model; code that comes with a model raises anything.
_DAMAGES = (OSError, ValueError, LookupError, RuntimeError, ImportError)
_MISFITS = (UnusableModel, RuntimeError, TypeError, AttributeError, LookupError, ValueError)
_ANYTHING = (Exception,)


class HookModel:
    """A `transformers` decoder over the paged cache; see `Model` for its calls. `forward` returns logits already."""

    def __init__(
        self, name: str, module: Any, dtype: torch.dtype, device: torch.device, quantize: bool = False
    ) -> None:
        self.module = module
        self.likeliest: Callable[[torch.Tensor], torch.Tensor] | None = None  # `forward` has made the logits already
        parameters = inspect.signature(module.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._is_falcon = module.config.model_type == "falcon"
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        if self._is_falcon:
            adapt_falcon(module)
        weight_bytes = 0 if device.type == "meta" else fuse_gated(module, quantize)
        if device.type == "cpu":
            weight_bytes += pack_linears(module, quantize)
        weight_bytes += sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        self._folds_lengths = follow_lengths(module)
        self._set_attention(ATTENTION_NAME)
        probe, vocab_size = self._probe(device)
        config = module.config
        if getattr(config, "max_position_embeddings", None) is None:
            raise UnusableModel("its config.json does not say how long a sequence may be")
        self.spec = ModelSpec(
            name=name,
            architecture=config.model_type,
            path="hook",
            vocab_size=vocab_size,
            max_position=config.max_position_embeddings,
            layers=tuple(probe.layers[index] for index in range(len(probe.layers))),
            dtype=dtype,
            device=device,
            weight_bytes=weight_bytes,
            kv_depends_on_length=self._folds_lengths,
        )
        _check_windows(config, probe)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kv_cache: KVCache, attention: AttentionBackend) -> torch.Tensor:
        """The logits of `batch.logit_rows`, [R, vocab_size]."""
        positions = fold_lengths(batch.positions, batch.rope_lens) if self._folds_lengths else batch.positions
        call = PagedCall(batch, kv_cache, attention)
        return self._run(batch.input_ids, positions, batch.logit_rows, call)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows as they are."""
        return hidden

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        keywords: dict[str, Any] = {"logits_to_keep": rows} if self._keeps_logits else {}
        keywords |= {self._cache_keyword: CallAsCache(call)} if self._is_falcon else {"pagedgen_call": call}
        output = self.module(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **keywords)
        logits: torch.Tensor = output.logits[0]
        if not self._keeps_logits:
            return logits[rows]
        if logits.shape[0] != rows.shape[0]:
            raise UnusableModel("it does not return the rows of logits it is asked for")
        return logits

    @torch.no_grad()
    def own_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T, vocab_size] of one whole sequence through the model's own eager attention."""
        positions = torch.arange(len(input_ids), device=input_ids.device)
        folded = {}
        if self._folds_lengths:
            folded["position_ids"] = fold_lengths(positions, torch.full_like(positions, len(input_ids)))[None]
        self._set_attention("eager")
        try:
            logits: torch.Tensor = self.module(input_ids=input_ids[None], use_cache=False, **folded).logits[0]
        finally:
            self._set_attention(ATTENTION_NAME)
        return logits

    def _set_attention(self, name: str) -> None:
        if self._is_falcon:  # set_attn_implementation refuses it; once it is built only its masks depend on the name
            self.module.config._attn_implementation = name
        else:
            self.module.set_attn_implementation(name)

    @torch.no_grad()
    def _probe(self, device: torch.device) -> tuple[Probe, int]:
        """Run two tokens without a cache to learn the layers' shapes and the size of the vocabulary."""
        probe = Probe()
        positions = torch.arange(2, device=device)
        folded = fold_lengths(positions, positions + 1) if self._folds_lengths else positions
        logits = self._run(torch.zeros_like(positions), folded, positions[1:], probe)
        count = self.module.config.num_hidden_layers
        if sorted(probe.layers) != list(range(count)):
            raise UnusableModel(f"only {len(probe.layers)} of its {count} layers call the attention function")
        return probe, int(logits.shape[-1])


def _check_windows(config: Any, probe: Probe) -> None:
    """A window that a model keeps to itself would pass a check on a few tokens and be missed on long prompts."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= config.max_position_embeddings:
        return
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(probe.layers)
    for layer, kind in enumerate(kinds):
        if kind == "sliding_attention" and probe.windows[layer] is None:
            raise UnusableModel("it does not tell its attention layers about its sliding window")


def load_hf_model(
    name: str,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    own_code: bool = False,
    quantize: bool = False,
) -> HookModel:
    """Load and self-check a model, with own_code by the Python code that comes with it. Raises PagedgenError, naming
    it, when it cannot be loaded or the hook does not fit it."""
    from pagedgen.models.self_check import self_check

    register_attention()
    module = _load_module(name, folder, dtype, device, own_code).to(device).eval().requires_grad_(False)
    misfits = _ANYTHING if own_code else _MISFITS
    try:
        model = HookModel(name, module, dtype, device, quantize)
        self_check(model, choose_backend(device))
    except misfits as error:
        raise PagedgenError(
            f"{name} cannot run in pagedgen: the attention hook does not fit its architecture "
            f"({module.config.model_type}): {' '.join(str(error).split())}; choose another model"
        ) from error
    return model


def _load_module(name: str, folder: Path, dtype: torch.dtype, device: torch.device, own_code: bool) -> Any:
    """The model on the device; on the CPU where `transformers` lacks what it takes to read it elsewhere."""
    import transformers
    from transformers.utils import is_accelerate_available, logging

    had_progress_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    damages = _ANYTHING if own_code else _DAMAGES
    onto = {"device_map": {"": device}} if device.type != "cpu" and is_accelerate_available() else {}
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", trust_remote_code=own_code, use_safetensors=True, **onto
        )
    except damages as error:
        reason = " ".join(str(error).split())
        code = f", and whether its code is for transformers {transformers.__version__}" if own_code else ""
        raise PagedgenError(
            f"{name} cannot be loaded by transformers ({reason}); check the model's files{code}"
        ) from error
    finally:
        if had_progress_bar:
            logging.enable_progress_bar()
