"""What a command refuses before any work: exit code 2, and neither torch nor weights for what can be known without."""

import pytest
from cli_cases import PROMPTS, call, sentence, write_jsonl
from test_project import run_python


@pytest.fixture(autouse=True)
def without_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--stop-token-ids", "999999", "--stop-token-ids 999999 is no token of the model"),
        ("--logit-bias", '{"999999": 1}', "--logit-bias 999999 is no token of the model"),
        ("--top-k", "1000000000", "--top-k is 1000000000"),
        ("--kv-memory", "100B", "--kv-memory 100 B is less than one KV block"),
        ("--max-seqs", "1000000000000", "--max-seqs 1000000000000 does not fit"),
        ("--max-model-len", "100000", "--max-model-len 100000 is more than"),
        ("--output", "/proc/out.parquet", "nothing can be made in /proc"),
    ],
)
def test_what_can_be_known_is_refused_before_the_model_is_loaded(folder, model, option, value, words, monkeypatch):
    def load_nothing(_):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("pagedgen.engine.load_model", load_nothing)
    write_jsonl(folder / "in.jsonl", PROMPTS)
    code, _, stderr = call("run", "in.jsonl", "-m", model, option, value)
    assert code == 2
    assert words in sentence(stderr)


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_missing_file_is_found_before_torch_is_imported(command):
    code = (
        f"import sys; sys.argv = ['pagedgen', '{command}', 'nowhere.jsonl']\n"
        "from pagedgen.cli import app\n"
        "try:\n    app()\nexcept SystemExit as end:\n    assert end.code == 2, end.code\n"
        "print(sorted(set(sys.modules) & {'torch', 'transformers'}))"
    )
    assert run_python(code) == "[]\n"


JUNK = {
    "junk.parquet": b"PAR1 no",
    "junk.jsonl.gz": b"no",
    "wide.jsonl": "{}".encode("utf-16"),
    "twice.csv": b"prompt,prompt\na,b\n",
    "broken.json": b"[{]",
}


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize("name", JUNK)
def test_an_input_that_cannot_be_read_from_its_beginning_is_a_wrong_command(folder, model, command, name):
    (folder / name).write_bytes(JUNK[name])
    code, stdout, stderr = call(command, name, "-m", model)
    assert (code, stdout) == (2, "")
    assert name in sentence(stderr)


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize("config", [None, "{", '{"model_type": "mamba"}'])
def test_a_model_that_cannot_be_used_is_a_wrong_command(folder, command, config):
    write_jsonl(folder / "in.jsonl", PROMPTS)
    name = "nobody/there"
    if config is not None:
        (folder / "own").mkdir()
        (folder / "own" / "config.json").write_text(config)
        name = "own"
    code, stdout, stderr = call(command, "in.jsonl", "-m", name)
    assert (code, stdout) == (2, "")
    assert name in sentence(stderr)
