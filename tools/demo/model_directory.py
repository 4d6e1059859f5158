"""A model in a directory, as `save_pretrained` leaves it: looked at, and loaded.

Weights are safetensors only: nothing that is unpickled, and files whose header says whether they
are whole. transformers is imported when something is asked, not before.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from lightcache.errors import ConfigError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100 << 20  # bytes: the limit of the format's own reader
_LONGEST_SAID = 300  # characters
_ELSEWHERE = "choose a causal language model that keeps all keys and values"


def checked(directory: str) -> Any:
    """The configuration of the text model; the weights' files are seen to be there and whole.

    Raises:
        ConfigError: see `lightcache.tools.demo.models.preflight`.
    """
    config = _config(directory).get_text_config(decoder=True)
    _check_weights(Path(directory))
    if not getattr(config, "num_attention_heads", None):
        raise ConfigError(f"{directory}: config.json has no attention heads; {_ELSEWHERE}")
    return config


def load(directory: str, dtype: str) -> Any:
    """The model, on the CPU.

    Raises:
        ConfigError: it cannot be loaded, or weights are missing or of another shape.
    """
    torch, transformers = import_module("torch"), _transformers()
    config = _config(directory)
    try:
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            torch_dtype=getattr(torch, dtype),  # the name that old releases know as well
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as problem:  # whatever a damaged file makes of other people's code
        raise ConfigError(
            f"{directory}: the weights cannot be loaded: {one_line(problem)}; they may be "
            "damaged: fetch the model again"
        ) from None
    wrong = [*loaded.get("missing_keys", ()), *loaded.get("mismatched_keys", ())]
    if wrong:
        raise ConfigError(
            f"{directory}: {len(wrong)} weights are missing or of another shape, among them "
            f"{min(map(str, wrong))}; fetch the model again"
        )
    return model


def _config(directory: str) -> Any:
    """The configuration, of a kind that the demo supports."""
    raw = _raw_config(directory)
    transformers, kind = _transformers(), raw.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        if "auto_map" in raw:
            raise ConfigError(
                f"{directory}: the model needs custom code of its own, which is never run here; "
                "choose a model that transformers knows itself"
            )
        raise ConfigError(
            f"{directory}: config.json: transformers does not know the model_type {kind!r}; "
            "upgrade transformers, or choose another model"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        config.get_text_config(decoder=True)
    except Exception as problem:  # configurations check themselves, each in its own way
        raise ConfigError(
            f"{directory}: config.json is not usable: {one_line(problem)}; fetch the model again"
        ) from None
    _check_causal(directory, config, raw)
    _check_attention(directory, config)
    return config


def _raw_config(directory: str) -> dict[str, Any]:
    folder = Path(directory)
    if not folder.is_dir():
        what = "a file" if folder.exists() else "nothing"
        raise ConfigError(
            f"{directory}: expected a directory with a model, found {what}; models are not "
            "fetched by name: give the path of one"
        )
    found = _json(folder / "config.json")
    if found is None:
        raise ConfigError(
            f"{directory}: there is no config.json; give a directory that save_pretrained wrote"
        )
    return found


def _check_causal(directory: str, config: Any, raw: dict[str, Any]) -> None:
    auto = import_module("transformers.models.auto.modeling_auto")
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # class names by model_type
    known = {name for names in causal.values() for name in _names(names)}
    named = raw.get("architectures") or []
    wrong = bool(named) and not known & {str(name) for name in _names(named)}
    if config.model_type not in causal or wrong or getattr(config, "is_encoder_decoder", False):
        said = ", ".join(map(str, _names(named))) or config.model_type
        raise ConfigError(f"{directory}: {said} is not a causal language model; {_ELSEWHERE}")


def _names(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _check_attention(directory: str, config: Any) -> None:
    """Refuse what does not keep the keys and values of all tokens in every layer."""
    text = config.get_text_config(decoder=True)
    kinds = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    kinds |= {str(kind) for kind in getattr(text, "layers_block_type", None) or ()}
    other = kinds - {"full_attention", "attention"}
    window = getattr(text, "sliding_window", None)
    if window and not kinds and getattr(text, "use_sliding_window", True):
        other.add("sliding_attention")
    if getattr(text, "attention_chunk_size", None) and not kinds:
        other.add("chunked_attention")
    if getattr(text, "kv_lora_rank", None):
        other.add("latent attention")
    if other:
        raise ConfigError(
            f"{directory}: layers of the kind {', '.join(sorted(other))} are not supported yet; "
            f"{_ELSEWHERE}"
        )


def _check_weights(folder: Path) -> None:
    """See that the files of weights that transformers would read are there and whole."""
    index = None if (folder / _SINGLE).exists() else _json(folder / _INDEX)
    try:
        names = [_SINGLE] if index is None else sorted(set(index["weight_map"].values()))
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{folder / _INDEX}: there is no weight_map; fetch the model again"
        ) from None
    for name in names:
        _check_file(folder / str(name))


def _check_file(path: Path) -> None:
    """A safetensors file: 8 bytes length of a JSON header, the header, the tensors' bytes."""
    if not path.is_file():
        raise ConfigError(
            f"{path.parent}: there is no {path.name}; weights are read from safetensors only: "
            "fetch the model again, or save it with save_pretrained"
        )
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _LONGEST_HEADER)))
        ends = [of["data_offsets"][1] for name, of in header.items() if name != "__metadata__"]
        whole = size == 8 + length + max(ends, default=0)
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ConfigError(f"{path}: the weights are damaged or cut off; fetch the model again")


def _json(path: Path) -> dict[str, Any] | None:
    """An object in a file; None: there is no such file."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{path}: no JSON: {problem}; fetch the model again") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected an object, found a {type(found).__name__}")
    return found


def _transformers() -> Any:
    """The module. Its types differ between releases, so none are assumed."""
    return import_module("transformers")


def one_line(problem: Exception) -> str:
    """What somebody else's error says, for the middle of a message of ours."""
    said = " ".join(str(problem).split())
    return (said[:_LONGEST_SAID] + "...") if len(said) > _LONGEST_SAID else said or repr(problem)
