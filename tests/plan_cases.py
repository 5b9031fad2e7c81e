"""What the tests of plans share: prompts, and a job over them in a small pool."""

from cli_cases import write_jsonl
from job_cases import job

from pagedgen.config import EngineConfig

TEXT = "the quick brown fox jumps over the lazy dog "
SMALL = {"kv_memory": 2 << 20, "max_seqs": 16, "max_model_len": 128, "block_size": 8}


def prompts(count, shared=True):
    start = TEXT * 2 if shared else ""
    return [{"prompt": f"{start}{TEXT[: number % 17]}{number}"} for number in range(count)]


def config_of(folder, model, input_rows, engine=None, **changes):
    write_jsonl(folder / "in.jsonl", input_rows)
    engine = EngineConfig(model=model, **(SMALL | (engine or {})))
    return job(folder, model, engine=engine, **changes)
