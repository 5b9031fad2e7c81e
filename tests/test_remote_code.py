"""Models that bring Python code: it runs only where it is both trusted and needed, and then the self-check decides."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import random_sequences, tiny_checkpoint
from transformers import dynamic_module_utils

from pagedgen import Engine, EngineConfig, PagedgenError, Request, SamplingParams
from pagedgen.models import source as sources
from pagedgen.models.loader import check_model, load_model
from pagedgen.models.source import ModelSource, needs_own_code, resolve_model

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
MARK = "from pathlib import Path\nPath({!r}).open('a').write({!r})\n"
CONFIG = "from transformers import LlamaConfig\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
MODEL = (
    "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n\n"
    "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
)
# A model that attends by itself, in a way that the hook never sees.
UNHOOKED = """
import torch
from transformers import PreTrainedModel, GenerationMixin
from transformers.modeling_outputs import CausalLMOutput
from .configuration_own import OwnConfig

class OwnForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(config.vocab_size, config.hidden_size)})
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, position_ids=None, use_cache=False, **_):
        hidden = self.model["embed_tokens"](input_ids)
        return CausalLMOutput(logits=self.lm_head(hidden.cumsum(1)))
"""
# One that mixes what the sequences of a batch give.
MIXING = (
    MODEL
    + """
    def forward(self, input_ids=None, **keywords):
        output = super().forward(input_ids=input_ids, **keywords)
        output.logits = output.logits.cumsum(1)
        return output
"""
)


@pytest.fixture(scope="module", autouse=True)
def own_module_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where transformers copies the code that it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", list(sys.path))
        yield


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Where the code says that it ran."""
    return tmp_path / "it-ran"


def bring_code(folder: Path, marker: Path, *, config: str = CONFIG, model: str = MODEL, **values: Any) -> Path:
    """Let a checkpoint's model be one that its own code implements, each file of which leaves a mark when it runs."""
    (folder / "configuration_own.py").write_text(MARK.format(str(marker), "c") + config)
    (folder / "modeling_own.py").write_text(MARK.format(str(marker), "m") + model)
    stated = json.loads((folder / "config.json").read_text())
    stated |= {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(stated | values))
    return folder


def make_engine(folder: Path, trust: bool) -> Engine:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", kv_memory=1 << 22, block_size=4, trust_remote_code=trust
    )
    return Engine(config)


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    prompts = random_sequences([3, 9, 20])
    requests = [Request(i, str(i), prompt_token_ids=tuple(ids), params=PARAMS) for i, ids in enumerate(prompts)]
    found = {c.row: c.token_ids for c in engine.generate(requests)}
    return [found[row] for row in range(3)]


def test_code_that_is_not_trusted_does_not_run(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    folder = bring_code(tiny_checkpoint(tmp_path, "llama"), marker)
    for attempt in (lambda: make_engine(folder, False), lambda: check_model(resolve_model(str(folder)))):
        with pytest.raises(PagedgenError, match="--trust-remote-code") as caught:
            attempt()
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_trusted_code_runs_and_gives_the_same(tmp_path: Path, marker: Path) -> None:
    plain = tiny_checkpoint(tmp_path / "plain", "llama")
    folder = bring_code(tiny_checkpoint(tmp_path / "own", "llama"), marker)
    engine = make_engine(folder, True)
    assert set(marker.read_text()) == {"c", "m"}
    assert (engine.spec.path, engine.spec.architecture) == ("hook", "own_llama")
    assert type(engine.model.module).__name__ == "OwnForCausalLM"
    assert tokens(engine) == tokens(make_engine(plain, False))


@pytest.mark.parametrize("trust", [False, True])
def test_code_for_what_transformers_implements_itself_is_left_alone(trust: bool, tmp_path: Path, marker: Path) -> None:
    folder = bring_code(tiny_checkpoint(tmp_path, "llama"), marker, model_type="llama")
    gpt2 = tiny_checkpoint(tmp_path, "gpt2")
    bring_code(gpt2, marker, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    for model, path in ((folder, "native"), (gpt2, "hook")):
        loaded = load_model(EngineConfig(model=str(model), device="cpu", trust_remote_code=trust))
        assert loaded.model.spec.path == path
    assert not marker.exists()


def test_a_known_config_without_a_language_model_needs_the_code(tmp_path: Path, marker: Path) -> None:
    """As of a vision model's text decoder: the type is known, but not as something that generates."""
    folder = bring_code(tiny_checkpoint(tmp_path, "llama"), marker, model_type="vit")
    assert needs_own_code(folder)
    with pytest.raises(PagedgenError, match="--trust-remote-code"):
        load_model(EngineConfig(model=str(folder), device="cpu"))
    assert not marker.exists()


def test_pickled_weights_are_not_read_though_the_code_is_trusted(tmp_path: Path, marker: Path) -> None:
    class Pickled:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "unpickled",)

    folder = bring_code(tiny_checkpoint(tmp_path, "llama"), marker)
    (folder / "model.safetensors").unlink()
    torch.save(Pickled(), folder / "pytorch_model.bin")
    with pytest.raises(PagedgenError, match="pickled"):
        make_engine(folder, True)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": MIXING}, "its logits differ from its own attention's"),
        ({"model": UNHOOKED}, "only 0 of its 2 layers call the attention function"),
        ({"model": "raise AssertionError('made for another version')\n"}, "made for another version.*its code is for"),
        ({"model": "import no_such_module\n"}, "no_such_module"),
        ({"config": "def broken(:\n"}, "config.json is no usable own_llama config .* and the code that comes with it"),
        ({"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}, "names no AutoModelForCausalLM"),
        ({"auto_map": {"AutoConfig": "not_there.OwnConfig"}}, "not_there"),
    ],
)
def test_trusted_code_that_does_not_work_is_refused_in_a_sentence(
    changes: dict[str, Any], reason: str, tmp_path: Path, marker: Path
) -> None:
    folder = bring_code(tiny_checkpoint(tmp_path, "llama"), marker, **changes)
    with pytest.raises(PagedgenError, match=reason) as caught:
        load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32", trust_remote_code=True))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_is_downloaded_only_when_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        raise OSError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = ModelSource("hub", "me/own")
    for trust in (False, True):
        for fetch in (sources.fetch_config, sources.fetch):
            with pytest.raises(PagedgenError):
                fetch(source, trust)
    assert ["*.py" in patterns for patterns in asked] == [False, False, True, True]
    assert asked[0] == ["config.json"]
    assert not any("bin" in pattern for patterns in asked for pattern in patterns)
