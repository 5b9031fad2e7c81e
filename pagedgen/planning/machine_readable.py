"""A plan as programs read it: what `pagedgen plan --json` prints. Bytes, tokens and seconds are plain numbers."""

from typing import Any

from pagedgen.planning.plan import Plan
from pagedgen.planning.report import histogram


def as_json(plan: Plan) -> dict[str, Any]:
    """The report's parts by name; see the README."""
    return {
        "model": _model(plan),
        "rows": _rows(plan),
        "prompts": _prompts(plan),
        "memory": _memory(plan),
        "work": _work(plan),
        "disk": {
            "kind": plan.disk.kind,
            "output_bytes": plan.disk.output_bytes,
            "while_merging_bytes": plan.disk.with_parts_bytes,
            "free_bytes": plan.disk.free_bytes,
        },
    }


def _model(plan: Plan) -> dict[str, Any]:
    facts = plan.facts
    return {
        "name": facts.name,
        "architecture": facts.architecture,
        "path": facts.path,
        "device": facts.device.type,
        "dtype": str(facts.dtype).removeprefix("torch."),
        "kernels": plan.kernels,
        "parameters": facts.size.parameters,
        "weight_bytes": facts.size.weight_bytes,
        "kv_bytes_per_token": plan.pool.bytes_per_block / plan.block_size,
        "kv_bytes_per_block": plan.pool.bytes_per_block,
        "kv_is_exact": facts.layers_are_exact,
        "block_size": plan.block_size,
        "max_model_len": plan.max_model_len,
    }


def _rows(plan: Plan) -> dict[str, Any]:
    sample, survey = plan.sample, plan.survey
    return {
        "input": plan.input,
        "total": sample.total,
        "total_is": sample.kind,
        "looked_at": survey.read,
        "sample": sample.how,
        "statuses": {str(status): count for status, count in survey.statuses.items()},
        "errors": [{"status": str(example.status), "error": example.error} for example in survey.examples],
    }


def _prompts(plan: Plan) -> dict[str, Any]:
    """Of the rows looked at that can be run."""
    lengths = sorted(plan.survey.lengths)
    return {
        "tokens": sum(lengths),
        "mean": sum(lengths) / len(lengths) if lengths else None,
        "median": lengths[len(lengths) // 2] if lengths else None,
        "max": lengths[-1] if lengths else None,
        "shared_tokens": plan.survey.shared_tokens,
        "histogram": [{"from": a, "to": b, "rows": n} for a, b, n in (histogram(lengths) if lengths else ())],
    }


def _memory(plan: Plan) -> dict[str, Any]:
    pool = plan.pool
    return {
        "kv_bytes": pool.num_blocks * pool.bytes_per_block,
        "kv_blocks": pool.num_blocks,
        "kv_is_given": pool.is_given,
        "free_bytes": pool.free_bytes,
        "activation_bytes": pool.activation_bytes,
        "activations_are_measured": pool.is_measured,
        "logits_bytes": pool.logits_bytes,
        "typical_tokens": plan.typical_tokens,
        "sequences_typical": plan.fitting_typical,
        "sequences_full": plan.fitting_full,
        "peak_kv_bytes": plan.peak_kv_bytes,
        "peak_running": plan.outcome.peak_running,
    }


def _work(plan: Plan) -> dict[str, Any]:
    return {
        "generating_s": plan.generating_s,
        "load_s": plan.load_s,
        "steps": plan.steps,
        "prompt_tokens": plan.of_all("prompt_tokens"),
        "cached_prompt_tokens": plan.of_all("cached_tokens"),
        "output_tokens": plan.of_all("output_tokens"),
        "preemptions": plan.of_all("preemptions"),
        "simulated_rows": plan.outcome.rows,
        "lengths": plan.length_source,
        "step_times": plan.time_source,
        "measured_step_tokens": plan.measured_tokens,
        "peak_step_tokens": max(plan.outcome.step_tokens, default=0),
    }
