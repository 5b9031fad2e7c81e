"""The native path of the Llama family: llama, mistral, qwen2, qwen3 and smollm3, with fused projections.

Sources: Touvron et al., 2023 (LLaMA); Jiang et al., 2023 (Mistral 7B); the Qwen2, Qwen3 and SmolLM3 reports. The order
of casts is that of `transformers`, so that logits agree.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from pagedgen.execution.attention import AttentionBackend
from pagedgen.execution.batch import ForwardBatch
from pagedgen.execution.kv_cache import KVCache, LayerKV
from pagedgen.models.base import ModelSpec
from pagedgen.models.linear import Linear, argmax_of, linear_bytes, make_linear
from pagedgen.models.rope import RotaryEmbedding
from pagedgen.models.smoothing import LayerParts, LayerRanges, Projection, RangeRecorder, smooth
from pagedgen.models.weights import Checkpoint

if TYPE_CHECKING:
    from pagedgen_kernels.cpu.decoder import Decoder

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})


def is_native(config: Any) -> bool:
    """Whether this module computes the model: one of the family, with the activation that all of them use."""
    return config.model_type in MODEL_TYPES and config.hidden_act == "silu"


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer. window: sliding window in tokens, or None. use_rope: False in SmolLM3's NoPE layers."""

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear  # gives silu(gate) * up
    down: Linear
    window: int | None
    use_rope: bool


class _Recorders(NamedTuple):
    """Of one layer's linear layers, in the order of LayerRanges."""

    output: RangeRecorder
    gate_up: RangeRecorder


class _KeptDecoder(NamedTuple):
    """cache: the cache that the decoder, if there is one, reads and writes; it may be given up at any time."""

    cache: "weakref.ref[KVCache]"
    kernels: ModuleType
    decoder: "Decoder | None"


class LlamaModel:
    """A decoder over packed weights; see `Model` for its calls."""

    def __init__(
        self, name: str, config: Any, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._eps: float = config.rms_norm_eps
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._loader = loader = _Loader(config, checkpoint, dtype, device)
        self._embedding = loader.tensor("model.embed_tokens.weight")
        self._layers = tuple(loader.layer(index) for index in range(config.num_hidden_layers))
        self._next_norms = (*(layer.input_norm for layer in self._layers[1:]), loader.tensor("model.norm.weight"))
        self._head = loader.head(self._embedding)
        self.likeliest = argmax_of(self._head)
        self._rope = RotaryEmbedding(config, device, dtype)
        self._decoder: _KeptDecoder | None = None
        self.spec = ModelSpec(
            name=name,
            architecture=config.model_type,
            path="native",
            vocab_size=self._embedding.shape[0],
            max_position=config.max_position_embeddings,
            layers=(LayerKV(self._num_kv_heads, self._head_dim, self._head_dim),) * config.num_hidden_layers,
            dtype=dtype,
            device=device,
            weight_bytes=loader.bytes,
            kv_depends_on_length=self._rope.depends_on_length,
        )

    def quantize(self, run: Callable[[], None]) -> None:
        """Put layers of eight bits in place of the output, gate and up projections. run: runs some text through the
        model, which shows how large their inputs get."""
        recorders = [_Recorders(*map(RangeRecorder, (layer.output, layer.gate_up))) for layer in self._layers]
        pairs = zip(self._layers, recorders, strict=True)
        self._layers = tuple(replace(layer, output=r.output, gate_up=r.gate_up) for layer, r in pairs)
        self._decoder = None
        run()
        self._decoder = None
        ranges = [LayerRanges(*(recorder.measured for recorder in found)) for found in recorders]
        recorders.clear()
        loader, layers = self._loader, list(self._layers)
        self._layers = ()
        for index, found in enumerate(ranges):  # each in turn, so that two whole models are never held
            layers[index] = loader.quantized_layer(index, found, self._head_dim, layers[index])
        self._layers = tuple(layers)
        self.spec = replace(self.spec, weight_bytes=loader.bytes)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache, attention: AttentionBackend) -> torch.Tensor:
        """The normalised hidden states of `batch.logit_rows`, [R, hidden_size]."""
        residual: torch.Tensor = functional.embedding(batch.input_ids, self._embedding)
        rotation = self._rope(batch.positions, batch.rope_lens)
        decoder = self.whole_decoder(kv_cache, attention)
        if decoder is None:
            return self._layer_by_layer(residual, rotation, batch, kv_cache, attention)
        tables = batch.block_tables, batch.context_lens, batch.query_start
        normed: torch.Tensor = decoder(residual, rotation, batch.slot_mapping, *tables, batch.logit_rows)
        return normed

    def whole_decoder(self, kv_cache: KVCache, attention: AttentionBackend) -> "Decoder | None":
        """What computes all layers at once with these kernels, where there is such a thing; kept for the next call."""
        kept = self._decoder
        if kept is None or kept.cache() is not kv_cache or kept.kernels is not attention.kernels:
            found = self._make_decoder(kv_cache, attention) if attention.name == "cpp" else None
            self._decoder = kept = _KeptDecoder(weakref.ref(kv_cache), attention.kernels, found)
        return kept.decoder

    def _make_decoder(self, kv_cache: KVCache, attention: AttentionBackend) -> "Decoder | None":
        from pagedgen_kernels import cpu
        from pagedgen_kernels.cpu.decoder import Decoder, DecoderLayer

        if attention.kernels is not cpu or any(layer.query_norm is not None for layer in self._layers):
            return None
        layers = [
            DecoderLayer(
                *(layer.input_norm, layer.qkv, layer.output, layer.post_norm, layer.gate_up, layer.down),
                *(kv_cache.key(index), kv_cache.value(index), layer.window, layer.use_rope),
            )
            for index, layer in enumerate(self._layers)
        ]
        final_norm = self._next_norms[-1]
        return Decoder(layers, final_norm, self._num_heads, self._eps) if Decoder.covers(layers, final_norm) else None

    def _layer_by_layer(
        self,
        residual: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        kv_cache: KVCache,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        kernels = attention.kernels
        normed: torch.Tensor = kernels.rms_norm(residual, self._layers[0].input_norm, self._eps)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            heads = self._attend(index, layer, normed, rotation, batch, kv_cache, attention)
            if index == len(self._layers) - 1:
                # past the last attention no token reads another, so only the rows that are asked for go on
                heads, residual = heads[batch.logit_rows], residual[batch.logit_rows]
            normed, residual = kernels.add_rms_norm(layer.output(heads), residual, layer.post_norm, self._eps)
            product = layer.down(layer.gate_up(normed))
            normed, residual = kernels.add_rms_norm(product, residual, next_norm, self._eps)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size], in the model's dtype."""
        return self._head(hidden)

    def _attend(
        self,
        index: int,
        layer: _Layer,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        kv_cache: KVCache,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """[T, hidden_size] -> [T, num_heads * head_dim]."""
        heads = layer.qkv(hidden).view(batch.num_tokens, -1, self._head_dim)
        query, key, value = torch.split(heads, [self._num_heads, self._num_kv_heads, self._num_kv_heads], dim=1)
        out = attention.forward(
            index,
            query,
            key,
            value,
            batch,
            kv_cache,
            scale=self._head_dim**-0.5,
            rotation=rotation if layer.use_rope else None,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=self._eps,
            sliding_window=layer.window,
        )
        return out.view(batch.num_tokens, -1)


class _Loader:
    """Reads, fuses and packs the weights of one model, counting the bytes that stay."""

    def __init__(self, config: Any, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._checkpoint, self._dtype, self._device = config, checkpoint, dtype, device
        attention_bias = getattr(config, "attention_bias", False)
        self._qkv_bias = attention_bias or config.model_type == "qwen2"
        self._output_bias = attention_bias
        self._mlp_bias = getattr(config, "mlp_bias", False)
        self.bytes = 0

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._checkpoint.load(name, self._dtype, self._device)
        self.bytes += tensor.nbytes
        return tensor

    def linear(self, *names: str, bias: bool, gated: bool = False) -> Linear:
        """The named projections of one input, fused along their outputs."""
        weights = [self.tensor(f"{name}.weight") for name in names]
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else []
        if len(names) == 1:
            return make_linear(weights[0], biases[0] if bias else None)
        return make_linear(torch.cat(weights), torch.cat(biases) if bias else None, gated=gated)

    def layer(self, index: int) -> _Layer:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        has_norms = self._config.model_type == "qwen3"
        return _Layer(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight"),
            qkv=self.linear(*(f"{attention}.{part}_proj" for part in "qkv"), bias=self._qkv_bias),
            query_norm=self.tensor(f"{attention}.q_norm.weight") if has_norms else None,
            key_norm=self.tensor(f"{attention}.k_norm.weight") if has_norms else None,
            output=self.linear(f"{attention}.o_proj", bias=self._output_bias),
            post_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=self._mlp_bias, gated=True),
            down=self.linear(f"{mlp}.down_proj", bias=self._mlp_bias),
            window=self._window(index),
            use_rope=self._config.model_type != "smollm3" or bool(self._config.no_rope_layers[index]),
        )

    def quantized_layer(self, index: int, ranges: LayerRanges, head_dim: int, layer: _Layer) -> _Layer:
        """The layer once more, some of it in eight bits."""
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        query, key = (self._projection(f"{attention}.{name}_proj", self._qkv_bias) for name in "qk")
        parts = LayerParts(
            value=self._projection(f"{attention}.v_proj", self._qkv_bias),
            output=self._projection(f"{attention}.o_proj", self._output_bias),
            post_norm=layer.post_norm,
            gate=self._projection(f"{mlp}.gate_proj", self._mlp_bias),
            up=self._projection(f"{mlp}.up_proj", self._mlp_bias),
        )
        quantized = (parts.output, parts.gate, parts.up)
        self.bytes -= sum(p.weight.nbytes + (0 if p.bias is None else p.bias.nbytes) for p in quantized)
        smoothed = smooth(parts, ranges, head_dim)
        qkv = _fused(query, key, smoothed.value, dtype=self._dtype)
        return replace(
            layer,
            qkv=make_linear(*qkv),
            output=self._quantized(smoothed.output),
            post_norm=smoothed.post_norm.to(self._dtype),
            gate_up=self._quantized(smoothed.gate, smoothed.up, gated=True),
        )

    def _projection(self, name: str, has_bias: bool) -> Projection:
        names = (f"{name}.weight", f"{name}.bias") if has_bias else (f"{name}.weight",)
        return Projection(*(self._checkpoint.load(each, self._dtype, self._device) for each in names))

    def _quantized(self, *projections: Projection, gated: bool = False) -> Linear:
        weight, bias = _fused(*projections, dtype=torch.float32)
        self.bytes += linear_bytes(weight, bias, True)
        return make_linear(weight, bias, quantize=True, gated=gated)

    def head(self, embedding: torch.Tensor) -> Linear:
        """The LM head; a tied one repacks the embedding. A head that the checkpoint has wins over a config that ties
        it, as in `transformers`."""
        if self._config.tie_word_embeddings and "lm_head.weight" not in self._checkpoint:
            if self._device.type == "cpu":
                self.bytes += embedding.nbytes
            return make_linear(embedding)
        return self.linear("lm_head", bias=False)

    def _window(self, index: int) -> int | None:
        config = self._config
        if config.model_type == "llama":
            return None
        sliding = config.model_type == "mistral" or config.layer_types[index] == "sliding_attention"
        window: int | None = config.sliding_window if sliding else None
        return window


def _fused(*projections: Projection, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight and bias of all of them, along their outputs."""
    biases = [p.bias.to(dtype) for p in projections if p.bias is not None]
    return torch.cat([p.weight.to(dtype) for p in projections]), torch.cat(biases) if biases else None
